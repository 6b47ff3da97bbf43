#!/bin/sh
# Install the Debian packages named in the lists $@ where that is possible; print the others.
set -eu
missing=""
for package in $(sed 's/#.*//' "$@"); do
    dpkg -s "$package" 2>/dev/null | grep -q '^Status: install ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing$missing"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086 - a list of names
    if apt-get update -qq >/dev/null && apt-get install -y -qq --no-remove --no-install-recommends $missing >/dev/null; then
        exit 0
    fi
fi
echo "not installed here:$missing (Debian: apt-get install$missing); tests that need them are skipped, and make test-all fails"
