#!/bin/sh
# Writes the manual page of a program from its --help and that of its commands: packaging/man_page.sh PROGRAM VERSION > PAGE
# The page is that of quire-NAME, as the program is called when it is installed.
set -eu
program=$1 version=$2
name=$(basename "$program")

# The commands of a help text on standard input.
commands() { awk '/^[A-Z][a-zA-Z ]*:$/ { on = tolower($1) == "subcommands:"; next } on && /^  [a-z]/ { print $1 }'; }

{
    "$program" --help
    for command in $("$program" --help | commands); do
        printf '\f%s\n' "$command"
        "$program" "$command" --help
    done
} | awk -v name="quire-$name" -v own="$name" -v version="$version" '
    # Text as it stands: a backslash, a dash and a leading dot mean something in a page.
    function plain(text) {
        gsub(/\\/, "\\e", text)
        gsub(/-/, "\\-", text)
        gsub(/→/, "\\(->", text)
        sub(/^[.\047]/, "\\\\\\&&", text)
        return text
    }
    function heading(text) { print ".SH " text; open = 0 }
    BEGIN { printf ".TH %s 1 \"\" \"quire %s\" \"quire\"\n.SH NAME\n", toupper(name), version }
    /^\f/ { command = substr($0, 2); if (!n_commands++) heading("COMMANDS"); print ".SS " plain(name " " command); first = 1; open = 0; next }
    NR == 1 { sub(/\.$/, ""); print plain(name) " \\- " plain($0); next }
    first && !/^(Usage|USAGE)/ && NF { print plain($0); first = 0; next }
    /^(Usage|USAGE):/ || (in_usage && /^  [^ -]/) {
        sub(/^(Usage|USAGE): */, "")
        in_usage = !NF
        if (!NF) next
        sub("^ *(" own ")? *", "")
        if (command == "") heading("SYNOPSIS")
        else print ".PP"
        print ".B " plain(name)
        print plain($0)
        first = 0
        next
    }
    /^[A-Za-z][A-Za-z ]*:$/ { # a section
        sub(/:$/, "")
        commands_listed = tolower($0) == "subcommands"
        if (commands_listed) next
        if (command == "") heading(toupper($0))
        open = 0
        next
    }
    commands_listed || !NF { next }
    /^  [^ ]/ { # a flag, and in the same line its text
        line = substr($0, 3)
        gap = match(line, /   */)
        flag = gap && gap > 1 ? substr(line, 1, gap - 1) : line
        text = gap && gap > 1 ? substr(line, gap) : ""
        sub(/^ */, "", text)
        print ".TP"
        print ".B " plain(flag)
        if (text != "") print plain(text)
        next
    }
    { sub(/^ */, ""); print plain($0) }
    END { print ".SH SEE ALSO"; print "The documentation in /usr/share/doc/quire, or beside the source files." }'
