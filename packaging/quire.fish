# Completion for fish: the flags are those of --help; other words are names of files.
for program in chat server bench inspect quantize block-viz
    complete -c quire-$program -n 'string match -q -- "-*" (commandline -ct)' \
        -a "(quire-$program --help 2>/dev/null | string match -ar -- '(?<=^  |,)--?[a-zA-Z][a-zA-Z0-9-]*')"
end
