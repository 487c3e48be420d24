#!/bin/sh
# Installs the programs that tests start, on Debian and Ubuntu, only those that are missing.
set -eu

missing=""
need() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
need redis-server redis-server
need redis-sentinel redis-sentinel
need redis-cli redis-tools
need g++ g++
need promtool prometheus
need chromium chromium
need haproxy haproxy
need nginx nginx-light
need systemd-analyze systemd

[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null 2>&1; then
    echo "Tests need:$missing. Install them with this system's package manager, then run make test again." >&2
    exit 1
fi
echo "==> Installing$missing"
as_root=""
[ "$(id -u)" = 0 ] || as_root="sudo"
export DEBIAN_FRONTEND=noninteractive
$as_root apt-get update -qq
# no service may start by itself: the tests start their own on free loopback ports
printf '#!/bin/sh\nexit 101\n' | $as_root tee /usr/sbin/policy-rc.d >/dev/null
$as_root chmod +x /usr/sbin/policy-rc.d
# shellcheck disable=SC2086  # a list of package names
$as_root apt-get install -y -qq --no-install-recommends $missing >/dev/null
$as_root rm -f /usr/sbin/policy-rc.d
