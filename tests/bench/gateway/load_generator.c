/* load_generator: closed-loop HTTP/1.1 load for chat endpoints; prints one JSON object.
 *
 *   cc -O2 -o load_generator load_generator.c
 *   ./load_generator PORT CONNECTIONS SECONDS BODIES.jsonl
 *
 * Line i of the file is the body of session i, sent with `x-session-id: session-i`; a line `NAME<tab>BODY` is a
 * turn of session NAME. Each connection sends the next line as soon as its last answer is complete. When the
 * file ends it begins again: the same sessions with plain lines, new ones (another number behind the name) with
 * named lines, whose turns must stand so far apart that the one before has been answered. Times in microseconds, from the last byte written:
 * `latency` to the end of the answer, `first_byte` to the first byte of its body. Events are counted in
 * streams (`data: ` lines but [DONE]). After SECONDS no request is started; what runs may finish.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum state { HEAD, SIZED, CHUNK_SIZE, CHUNK_DATA, TRAILER, IDLE };

struct connection {
    int fd;
    enum state state;
    const char *request;
    size_t request_len, sent;
    double started_us;
    int has_first_byte, is_event_stream, match;
    long left;                  /* bytes left of a sized body or of the current chunk */
    char line[16384];           /* the head, or a chunk-size line */
    size_t line_len;
};

struct samples { double *values; size_t len, cap; };

static int port, epoll_fd, num_requests, next_request;
static char **requests;
static size_t *request_lens;
static int (*pass_at)[2];       /* where a named session has the number of the pass, in both headers; 0: plain */
static struct samples latency, first_byte;
static long num_done, num_bad, num_errors, num_events, num_body_reads;
static int last_bad_status;
static double stop_us;

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static void add(struct samples *s, double value) {
    if (s->len == s->cap) s->values = realloc(s->values, sizeof(double) * (s->cap = s->cap ? 2 * s->cap : 65536));
    s->values[s->len++] = value;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(struct samples *s, double q) { return s->len ? s->values[(size_t)((s->len - 1) * q)] : 0; }

static void dial(struct connection *c) {
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int on = 1;
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(c->fd, (void *)&address, sizeof address)) { perror("load_generator: connect"); exit(1); }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event);
    c->state = IDLE;
}

static void send_more(struct connection *c) {
    while (c->sent < c->request_len) {
        ssize_t n = send(c->fd, c->request + c->sent, c->request_len - c->sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) break;
        if (n < 0) return;      /* the read side will see it */
        c->sent += n;
    }
    unsigned wanted = c->sent < c->request_len ? EPOLLIN | EPOLLOUT : EPOLLIN;
    struct epoll_event event = {.events = wanted, .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
}

/* Start the next request; 0 when the time is over. */
static int start(struct connection *c) {
    c->state = IDLE;
    if (now_us() >= stop_us) return 0;
    int i = next_request % num_requests, pass = next_request / num_requests % 10000;
    next_request++;
    for (int k = 0; k < 2 && pass_at[i][0]; k++) {
        char digits[16];
        snprintf(digits, sizeof digits, "%04d", pass);
        memcpy(requests[i] + pass_at[i][k], digits, 4);
    }
    c->request = requests[i];
    c->request_len = request_lens[i];
    c->sent = 0;
    c->state = HEAD;
    c->line_len = c->has_first_byte = c->match = 0;
    c->started_us = now_us();
    send_more(c);
    return 1;
}

static void finish(struct connection *c) {
    add(&latency, now_us() - c->started_us);
    num_done++;
    start(c);
}

static void fail(struct connection *c) {
    num_errors++;
    close(c->fd);
    dial(c);
    start(c);
}

static void count_events(struct connection *c, const char *data, size_t len) {
    static const char mark[] = "data: {";
    for (size_t i = 0; i < len; i++) {
        c->match = data[i] == mark[c->match] ? c->match + 1 : data[i] == mark[0];
        if (c->match == 7) num_events++, c->match = 0;
    }
}

static void take_body(struct connection *c, const char *data, size_t len) {
    if (!c->has_first_byte) c->has_first_byte = 1, add(&first_byte, now_us() - c->started_us);
    if (c->is_event_stream) count_events(c, data, len);
}

/* Value of a header line (its name in lower case with the colon), or NULL. */
static const char *header(const char *head, const char *name) {
    for (const char *line = strchr(head, '\n'); line; line = strchr(line + 1, '\n'))
        if (!strncasecmp(line + 1, name, strlen(name))) return line + 1 + strlen(name);
    return NULL;
}

static void read_head(struct connection *c) {
    c->line[c->line_len] = 0;
    int status = atoi(c->line + 9);
    if (status != 200) num_bad++, last_bad_status = status;
    const char *length = header(c->line, "content-length:"), *type = header(c->line, "content-type:");
    c->is_event_stream = type && strstr(type, "text/event-stream") != NULL;
    c->left = length ? atol(length) : 0;
    c->state = length ? SIZED : CHUNK_SIZE;
    c->line_len = 0;
    if (length && !c->left) finish(c);
}

/* One byte into the line buffer; 1 when the line (or the head) is complete. */
static int take_line(struct connection *c, char byte, const char *end) {
    if (c->line_len + 2 > sizeof c->line) { fprintf(stderr, "load_generator: head too long\n"); exit(1); }
    c->line[c->line_len++] = byte;
    size_t n = strlen(end);
    return c->line_len >= n && !memcmp(c->line + c->line_len - n, end, n);
}

static void chunk_size(struct connection *c) {
    c->line[c->line_len] = 0;
    c->left = strtol(c->line, NULL, 16) + 2;        /* with the line end behind the data */
    c->state = c->left == 2 ? TRAILER : CHUNK_DATA;
    c->line_len = 0;
}

static void take(struct connection *c, const char *data, size_t len) {
    for (size_t i = 0; i < len;) {
        size_t n = 1;
        switch (c->state) {
        case HEAD: if (take_line(c, data[i], "\r\n\r\n")) read_head(c); break;
        case CHUNK_SIZE: if (take_line(c, data[i], "\r\n")) chunk_size(c); break;
        case TRAILER: if (take_line(c, data[i], "\r\n")) { if (c->line_len == 2) finish(c); else c->line_len = 0; } break;
        case SIZED: case CHUNK_DATA:
            n = len - i < (size_t)c->left ? len - i : (size_t)c->left;
            take_body(c, data + i, n);
            c->left -= n;
            if (!c->left) { if (c->state == SIZED) finish(c); else c->state = CHUNK_SIZE; }
            break;
        case IDLE: fprintf(stderr, "load_generator: bytes nobody asked for\n"); exit(1);
        }
        i += n;
    }
}

static void receive(struct connection *c) {
    static char buffer[262144];
    ssize_t len = recv(c->fd, buffer, sizeof buffer, 0);
    if (len < 0 && errno == EAGAIN) return;
    if (len <= 0) { if (c->state == IDLE) { close(c->fd); dial(c); } else fail(c); return; }
    if (c->state != HEAD) num_body_reads++;
    take(c, buffer, len);
}

static void load(const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) { perror(path); exit(1); }
    char *line = NULL;
    size_t cap = 0;
    ssize_t len;
    while ((len = getline(&line, &cap, file)) > 0) {
        if (line[len - 1] == '\n') len--;
        requests = realloc(requests, sizeof *requests * (num_requests + 1));
        request_lens = realloc(request_lens, sizeof *request_lens * (num_requests + 1));
        pass_at = realloc(pass_at, sizeof *pass_at * (num_requests + 1));
        char session[64], *body = line, *tab = line[0] == '{' ? NULL : memchr(line, '\t', len);
        if (tab) {
            snprintf(session, sizeof session, "%.*s-0000", (int)(tab - line), line);
            body = tab + 1;
        } else {
            snprintf(session, sizeof session, "session-%d", num_requests);
        }
        ssize_t body_len = len - (body - line);
        char *request = malloc(body_len + 1024);
        int first_end, second_end;
        int head = sprintf(request,
                           "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nuser-agent: bench\r\n"
                           "accept: */*\r\nauthorization: Bearer sk-bench-0123456789\r\ncontent-type: application/json\r\n"
                           "x-session-id: %s%n\r\nx-smg-routing-key: %s%n\r\ncontent-length: %zd\r\n\r\n",
                           port, session, &first_end, session, &second_end, body_len);
        memcpy(request + head, body, body_len);
        pass_at[num_requests][0] = tab ? first_end - 4 : 0;
        pass_at[num_requests][1] = tab ? second_end - 4 : 0;
        requests[num_requests] = request;
        request_lens[num_requests++] = head + body_len;
    }
    fclose(file);
}

int main(int argc, char **argv) {
    if (argc != 5) { fprintf(stderr, "usage: load_generator PORT CONNECTIONS SECONDS BODIES.jsonl\n"); return 2; }
    signal(SIGPIPE, SIG_IGN);
    alarm(atoi(argv[3]) + 60);  /* whatever hangs, this ends */
    port = atoi(argv[1]);
    int num_connections = atoi(argv[2]);
    load(argv[4]);
    epoll_fd = epoll_create1(0);
    struct connection *connections = calloc(num_connections, sizeof *connections);
    double begin_us = now_us();
    stop_us = begin_us + atof(argv[3]) * 1e6;
    for (int i = 0; i < num_connections; i++) { dial(&connections[i]); start(&connections[i]); }
    struct epoll_event batch[256];
    for (int running = 1; running && now_us() < stop_us + 20e6;) {
        int n = epoll_wait(epoll_fd, batch, 256, 100);
        for (int i = 0; i < n; i++) {
            struct connection *c = batch[i].data.ptr;
            if (batch[i].events & EPOLLOUT) send_more(c);
            if (batch[i].events & ~EPOLLOUT) receive(c);
        }
        running = now_us() < stop_us;
        for (int i = 0; i < num_connections && !running; i++) running = connections[i].state != IDLE;
    }
    double elapsed_s = (now_us() - begin_us) / 1e6;
    qsort(latency.values, latency.len, sizeof(double), compare);
    qsort(first_byte.values, first_byte.len, sizeof(double), compare);
    printf("{\"num_done\":%ld,\"num_bad\":%ld,\"last_bad_status\":%d,\"num_errors\":%ld,\"num_events\":%ld,\"num_body_reads\":%ld,"
           "\"elapsed_s\":%.3f,\"latency_p50_us\":%.1f,\"latency_p99_us\":%.1f,\"first_byte_p50_us\":%.1f,"
           "\"first_byte_p99_us\":%.1f}\n",
           num_done, num_bad, last_bad_status, num_errors, num_events, num_body_reads, elapsed_s, quantile(&latency, .5),
           quantile(&latency, .99), quantile(&first_byte, .5), quantile(&first_byte, .99));
    return 0;
}
