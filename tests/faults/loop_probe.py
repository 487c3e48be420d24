"""Asks a gateway for `/livez` every 20 ms, from a process of its own, so that nothing else delays the asking.

`loop_probe.py PORT`: for each line of its input it prints one JSON list: what it waited since the last,
in seconds; it ends with its input.
"""

import http.client
import json
import select
import sys
import time

INTERVAL_S = 0.02


def main(port: int) -> None:
    waits_s: list[float] = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while True:
        if select.select([sys.stdin], [], [], INTERVAL_S)[0]:
            if not sys.stdin.readline():
                return
            print(json.dumps(waits_s), flush=True)
            waits_s = []
        started_s = time.perf_counter()
        connection.request("GET", "/livez")
        with connection.getresponse() as answer:
            answer.read()
            if answer.status != 200:
                sys.exit(f"/livez answered {answer.status}")
        waits_s.append(time.perf_counter() - started_s)


if __name__ == "__main__":
    main(int(sys.argv[1]))
