# Completion for fish: the flags and commands of a program of quire are those of its --help; other words are names of files.
function __quire_help
    set -l words (commandline -opc)
    if set -q words[2]; and string match -qr '^[a-z][a-z-]*$' -- $words[2]
        $words[1] $words[2] --help 2>/dev/null; and return
    end
    $words[1] --help 2>/dev/null
end
for program in chat server bench inspect quantize block-viz
    complete -c quire-$program -n 'string match -q -- "-*" (commandline -ct)' \
        -a "(__quire_help | string match -ar -- '(?:^ +|,)\K--?[a-zA-Z][a-zA-Z0-9-]*')"
    complete -c quire-$program -n 'test (count (commandline -opc)) -eq 1' \
        -a "(__quire_help | awk 'tolower(\$1) == \"subcommands:\" { on = 1; next } on && /^  [a-z]/ { print \$1 }')"
end
# The third word of quantize is a type, which --help lists with its bits.
complete -c quire-quantize -n 'test (count (commandline -opc)) -ge 3' \
    -a "(quire-quantize --help 2>/dev/null | awk '/^  [A-Z][A-Z0-9_]+ +[0-9.]+ / { print \$1 }')"
