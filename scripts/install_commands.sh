#!/bin/sh
# install_commands.sh COMMAND...: installs the Debian packages of these names if the commands are
# missing. It does not start their services, because the tests start their own servers on free ports.
set -eu

missing=""
for name in "$@"; do
    command -v "$name" >/dev/null || missing="$missing $name"
done
[ -n "$missing" ] || exit 0

give_up() {
    echo "missing:$missing ($1); install them so that they are on the PATH (Redis 7.0 or later)" >&2
    exit 1
}

command -v apt-get >/dev/null || give_up "there is no apt-get to install them with"
if [ "$(id -u)" -eq 0 ]; then
    as_root=""
elif sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    give_up "installing them needs root, or sudo without a password"
fi

# Packages ask this script before they start a service; 101 means no. An existing script stays.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap '$as_root rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' | $as_root tee "$policy" >/dev/null
    $as_root chmod 755 "$policy"
fi
# The dependencies of Chromium include a font.
install() {
    # shellcheck disable=SC2086  # one word each
    $as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install --yes --quiet --no-install-recommends $missing
}
# The package lists may be older than the archive. Fetch them only if the install fails.
install || { $as_root apt-get update --quiet && install; } || give_up "apt-get could not install them"
for name in $missing; do
    command -v "$name" >/dev/null || give_up "apt-get installed no command $name"
done
# The services must not start with the machine either.
for name in $missing; do
    command -v systemctl >/dev/null && $as_root systemctl disable --quiet "$name" 2>/dev/null || true
done
