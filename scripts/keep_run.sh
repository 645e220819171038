# keep_run DIR: moves what an earlier run has left in DIR aside, and says where; sourced by scripts that begin anew.
keep_run() {
    local number=1
    [[ -e "$1" ]] || return 0
    while [[ -e "$1.$number" ]]; do number=$((number + 1)); done
    mv "$1" "$1.$number"
    echo "== the earlier $1 is kept as $1.$number"
}
