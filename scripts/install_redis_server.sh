#!/bin/sh
# Installs Debian's redis-server when the command is missing, without starting its service:
# the tests start servers of their own, on free ports.
set -eu

command -v redis-server >/dev/null && exit 0

give_up() {
    echo "redis-server is missing: $1; install Redis 7.0 or later so that redis-server is on the PATH" >&2
    exit 1
}

command -v apt-get >/dev/null || give_up "there is no apt-get to install it with"
if [ "$(id -u)" -eq 0 ]; then
    as_root=""
elif sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    give_up "installing it needs root, or sudo without a password"
fi

# The packages ask this script before they start a service; 101 means no. One that is there stays.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap '$as_root rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' | $as_root tee "$policy" >/dev/null
    $as_root chmod 755 "$policy"
fi
install() {
    $as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install --yes --quiet --no-install-recommends redis-server
}
# The package lists may be older than the archive: fetch them only when that is so.
install || { $as_root apt-get update --quiet && install; } || give_up "apt-get could not install it"
command -v redis-server >/dev/null || give_up "apt-get installed no such command"
# Nor is it to run from the next start of the machine on.
command -v systemctl >/dev/null && $as_root systemctl disable --quiet redis-server || true
