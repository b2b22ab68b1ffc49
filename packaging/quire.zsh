#compdef quire-chat quire-server quire-bench quire-inspect quire-quantize quire-block-viz
# Completion for zsh: the flags and commands of a program of quire are those of its --help; other words are names of files.
local help
local -a names
if (( CURRENT > 2 )) && [[ $words[2] == [a-z]* ]]; then
    help=$($words[1] $words[2] --help 2>/dev/null) || help=
fi
[[ -n $help ]] || help=$($words[1] --help 2>/dev/null)
if [[ $words[CURRENT] == -* ]]; then
    names=(${(f)"$(grep -oE '(^ +|,)--?[a-zA-Z][a-zA-Z0-9-]*' <<<$help | tr -d ' ,')"})
    compadd -- $names
    return
fi
if (( CURRENT == 2 )); then
    names=(${(f)"$(awk 'tolower($1) == "subcommands:" { on = 1; next } on && /^  [a-z]/ { print $1 }' <<<$help)"})
    (( ! $#names )) || compadd -- $names
fi
if [[ $words[1] == *quantize ]] && (( CURRENT > 3 )); then # IN OUT TYPE
    names=(${(f)"$(awk '/^  [A-Z][A-Z0-9_]+ +[0-9.]+ / { print $1 }' <<<$help)"})
    compadd -- $names
fi
_files
