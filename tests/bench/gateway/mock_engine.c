/* mock_engine: an OpenAI-compatible engine that costs almost nothing, so that a gateway's cost shows.
 *
 *   cc -O2 -o mock_engine mock_engine.c && ./mock_engine 28001 28002        one backend per port
 *
 * POST /v1/chat/completions answers JSON, or an event stream when the body asks for one: each event is one
 * chunk in one write. GET /_mock/set?events=64&delay_us=10000 changes streams from then on. Every other GET
 * gets a small JSON that satisfies the routers' start-up checks. Single-threaded, epoll, 127.0.0.1 only.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

static int events_per_stream = 64, delay_us = 0, epoll_fd;

enum kind { LISTENER, CONNECTION, TIMER };

/* What epoll hands back. A connection that streams with a delay owns a TIMER source. */
struct source {
    enum kind kind;
    int fd;
    struct source *peer;    /* TIMER: its connection; CONNECTION: its timer or NULL */
    char *in;               /* received bytes that are not yet a complete request */
    size_t in_len, in_cap;
    char *out;              /* bytes that the socket did not take */
    size_t out_len, out_off;
    int events_left, is_dead;
};

static struct source *watch(enum kind kind, int fd) {
    struct source *s = calloc(1, sizeof *s);
    s->kind = kind;
    s->fd = fd;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = s};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    return s;
}

static void listen_on(int port) {
    int on = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(fd, (void *)&address, sizeof address) || listen(fd, 4096)) {
        perror("mock_engine: listen");
        exit(1);
    }
    watch(LISTENER, fd);
}

static void stop_timer(struct source *c) {
    if (!c->peer) return;
    close(c->peer->fd);
    c->peer->is_dead = 1;   /* freed by the main loop: an event of it may be waiting in this batch */
    c->peer = NULL;
}

static void drop(struct source *c) {
    if (c->is_dead) return;
    stop_timer(c);
    close(c->fd);
    c->is_dead = 1;
}

static void want(struct source *c, unsigned events) {
    struct epoll_event event = {.events = events, .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
}

static void put(struct source *c, const char *data, size_t len) {
    if (c->out_off == c->out_len) {
        ssize_t sent = send(c->fd, data, len, MSG_NOSIGNAL);
        if (sent == (ssize_t)len) return;
        if (sent < 0 && errno != EAGAIN) { drop(c); return; }
        if (sent > 0) data += sent, len -= sent;
        c->out_off = c->out_len = 0;
        want(c, EPOLLIN | EPOLLOUT);
    }
    c->out = realloc(c->out, c->out_len + len);
    memcpy(c->out + c->out_len, data, len);
    c->out_len += len;
}

static void flush_out(struct source *c) {
    ssize_t sent = send(c->fd, c->out + c->out_off, c->out_len - c->out_off, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) { drop(c); return; }
    if (sent > 0) c->out_off += sent;
    if (c->out_off == c->out_len) want(c, EPOLLIN);
}

static void respond(struct source *c, const char *json) {
    char answer[2048];
    int len = snprintf(answer, sizeof answer,
                       "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                       strlen(json), json);
    put(c, answer, len);
}

static void send_event(struct source *c) {
    int is_last = --c->events_left == 0;
    char event[512], framed[640];
    int len = snprintf(event, sizeof event,
                       "data: {\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,"
                       "\"model\":\"mock-model\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"token %d \"},"
                       "\"logprobs\":null,\"finish_reason\":%s}]}\n\n%s",
                       c->events_left, is_last ? "\"stop\"" : "null", is_last ? "data: [DONE]\n\n" : "");
    int framed_len = snprintf(framed, sizeof framed, "%x\r\n%s\r\n%s", len, event, is_last ? "0\r\n\r\n" : "");
    put(c, framed, framed_len);
}

static void start_stream(struct source *c) {
    const char *head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                       "transfer-encoding: chunked\r\n\r\n";
    put(c, head, strlen(head));
    c->events_left = events_per_stream;
    if (!delay_us) {
        while (c->events_left && !c->is_dead) send_event(c);
        return;
    }
    c->peer = watch(TIMER, timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK));
    c->peer->peer = c;
    struct timespec delay = {.tv_sec = delay_us / 1000000, .tv_nsec = delay_us % 1000000 * 1000L};
    struct itimerspec times = {.it_value = delay, .it_interval = delay};
    timerfd_settime(c->peer->fd, 0, &times, NULL);
}

/* Whether the body asks for a stream. Routers that decode the body write its fields in another order, so
 * the flag may be at either end; only where it is at none is the whole body searched. */
static int wants_stream(const char *body, size_t len) {
    static const char key[] = "\"stream\":";
    size_t edge = len < 400 ? len : 400;
    const char *found = memmem(body, edge, key, 9);
    if (!found) found = memmem(body + len - edge, edge, key, 9);
    if (!found) found = memmem(body, len, key, 9);
    return found && body + len - found >= 13 && !memcmp(found + 9, "true", 4);
}

static void answer_chat(struct source *c, const char *body, size_t len) {
    if (wants_stream(body, len)) { start_stream(c); return; }
    respond(c, "{\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion\",\"created\":1700000000,"
               "\"model\":\"mock-model\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":"
               "\"The quick brown fox jumps over the lazy dog, again and again, until the answer ends.\"},"
               "\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":30,"
               "\"total_tokens\":130,\"prompt_tokens_details\":{\"cached_tokens\":64}}}");
}

static void answer_get(struct source *c, const char *target) {
    if (!strncmp(target, "/_mock/set?", 11)) {
        const char *value;
        if ((value = strstr(target, "events="))) events_per_stream = atoi(value + 7);
        if ((value = strstr(target, "delay_us="))) delay_us = atoi(value + 9);
        respond(c, "{}");
    } else if (!strncmp(target, "/v1/models ", 11)) {
        respond(c, "{\"object\":\"list\",\"data\":[{\"id\":\"mock-model\",\"object\":\"model\",\"created\":1,"
                   "\"owned_by\":\"vllm\",\"root\":\"mock-model\",\"parent\":null,\"max_model_len\":131072}]}");
    } else {
        respond(c, "{\"model_path\":\"mock-model\",\"tokenizer_path\":\"\",\"is_generation\":true,"
                   "\"served_model_name\":\"mock-model\",\"model_id\":\"mock-model\",\"tp_size\":1,\"dp_size\":1,"
                   "\"version\":\"0.11.0\",\"max_total_num_tokens\":1000000,\"internal_states\":[{}]}");
    }
}

/* Length of the body that a head announces; -1 for chunked. */
static long body_length(const char *head, const char *end) {
    for (const char *line = head; (line = memchr(line, '\n', end - line)) && ++line < end;) {
        if (!strncasecmp(line, "content-length:", 15)) return atol(line + 15);
        if (!strncasecmp(line, "transfer-encoding:", 18)) return -1;
    }
    return 0;
}

/* Bytes of a complete chunked body, or 0 when more must come. Its content does not matter to us. */
static size_t chunked_size(const char *body, size_t len) {
    const char *last = memmem(body, len, "\r\n0\r\n\r\n", 7);
    return last ? (size_t)(last + 7 - body) : 0;
}

/* Answer every complete request in the buffer; one at a time while a stream runs. */
static void process(struct source *c) {
    while (!c->is_dead && !c->events_left && c->in_len) {
        char *head_end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
        if (!head_end) return;
        char *body = head_end + 4;
        size_t available = c->in + c->in_len - body;
        long length = body_length(c->in, body);
        size_t body_size = length < 0 ? chunked_size(body, available) : (size_t)length;
        if (available < body_size || (length < 0 && !body_size)) return;
        if (!strncmp(c->in, "POST ", 5)) answer_chat(c, body, body_size);
        else answer_get(c, c->in + 4);
        size_t used = body + body_size - c->in;
        memmove(c->in, c->in + used, c->in_len -= used);
    }
}

static void receive(struct source *c) {
    if (c->in_cap - c->in_len < 65536) c->in = realloc(c->in, c->in_cap = c->in_len + 262144);
    ssize_t len = recv(c->fd, c->in + c->in_len, c->in_cap - c->in_len - 1, 0);
    if (len < 0 && errno == EAGAIN) return;
    if (len <= 0) { drop(c); return; }
    c->in_len += len;
    c->in[c->in_len] = 0;
    process(c);
}

static void on_timer(struct source *timer) {
    unsigned long long expirations;
    if (read(timer->fd, &expirations, sizeof expirations) < 0) return;
    struct source *c = timer->peer;
    send_event(c);
    if (c->is_dead || c->events_left) return;
    stop_timer(c);
    process(c);
}

static void accept_all(struct source *listener) {
    for (;;) {
        int on = 1, fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK);
        if (fd < 0) return;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        watch(CONNECTION, fd);
    }
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    epoll_fd = epoll_create1(0);
    for (int i = 1; i < argc; i++) listen_on(atoi(argv[i]));
    struct epoll_event batch[256];
    for (;;) {
        int n = epoll_wait(epoll_fd, batch, 256, -1);
        for (int i = 0; i < n; i++) {
            struct source *s = batch[i].data.ptr;
            if (s->is_dead) continue;
            if (s->kind == LISTENER) accept_all(s);
            else if (s->kind == TIMER) on_timer(s);
            else {
                if (batch[i].events & EPOLLOUT) flush_out(s);
                if (!s->is_dead && batch[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(s);
            }
        }
        /* Sources that died in this batch are leaked on purpose: a few hundred bytes per connection of a
         * benchmark, against the bookkeeping that a safe free would need. */
    }
}
