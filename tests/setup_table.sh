#!/bin/sh
# Checks that the table of packages in docs/building.md lists what tools/setup.sh installs: one row for each set, without the
# packages of build.
set -eu
cd "$(dirname "$0")/.."
rc=0
for set in build sanitize lint clients pages real package bare; do
    told=$(sed -n "s/^| \`$set\` |[^|]*| \(.*\) |\$/\1/p" docs/building.md | tr ' ' '\n' | sort)
    installed=$(tools/setup.sh --list "$set" | sort)
    case $set in
        build | bare) ;;
        *) installed=$({ tools/setup.sh --list build; echo "$installed"; } | sort | uniq -u) ;;
    esac
    if [ "$told" != "$installed" ]; then
        rc=1
        echo "docs/building.md, set $set: the table says: $(echo $told); tools/setup.sh installs: $(echo $installed)" >&2
    fi
done
exit $rc
