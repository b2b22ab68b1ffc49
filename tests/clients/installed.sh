# Sourced by the scripts whose clients come from the package index; they stand in the root of the project.
installed() { # FOLDER REQUIREMENTS [FLAG OF PIP]: whether its packages are there, now
    cmp -s "$2" "$1/installed" && return
    rm -rf "$1"
    if python3 -m venv "$1" >build/clients.log 2>&1 &&
        "$1/bin/pip" install -q --disable-pip-version-check ${3:-} -r "$2" >>build/clients.log 2>&1; then
        cp "$2" "$1/installed"
    else
        echo "SKIP $2: $(grep -iE 'error|not' build/clients.log | tail -n 1)"
        return 1
    fi
}
