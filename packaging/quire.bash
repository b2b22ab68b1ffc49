# Completion for bash: the flags and commands of a program of quire are those of its --help; other words are names of files.
_quire() {
    local word=${COMP_WORDS[COMP_CWORD]} command=() help
    case ${COMP_WORDS[1]-} in
        [a-z]*) [ "$COMP_CWORD" -lt 2 ] || command=("${COMP_WORDS[1]}") ;;
    esac
    help=$("${COMP_WORDS[0]}" "${command[@]}" --help 2>/dev/null) || help=$("${COMP_WORDS[0]}" --help 2>/dev/null)
    if [[ $word == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$(grep -oE '(^ +|,)--?[a-zA-Z][a-zA-Z0-9-]*' <<<"$help" | tr -d ' ,')" -- "$word")
    elif [ "$COMP_CWORD" = 1 ]; then
        mapfile -t COMPREPLY < <(compgen -W "$(awk 'tolower($1) == "subcommands:" { on = 1; next } on && /^  [a-z]/ { print $1 }' <<<"$help")" -- "$word")
    elif [[ ${COMP_WORDS[0]} == *quantize ]] && [ "$COMP_CWORD" -gt 2 ]; then # IN OUT TYPE
        mapfile -t COMPREPLY < <(compgen -W "$(awk '/^  [A-Z][A-Z0-9_]+ +[0-9.]+ / { print $1 }' <<<"$help")" -- "$word")
    fi
}
complete -o default -F _quire quire-chat quire-server quire-bench quire-inspect quire-quantize quire-block-viz
