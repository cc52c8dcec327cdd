#!/usr/bin/env bash
# bash tools/tmux.sh config.toml [table.key=value ...]
# launch.sh in a tmux server of its own, beside a pane for each role's log. The panes stay after the run, to be read,
# until the session is left by Ctrl-b & or kill-server.
set -u
[ $# -ge 1 ] || { sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}"; exit 2; }
command -v tmux >/dev/null || { echo "tmux is not there" >&2; exit 2; }
config=$(realpath -m -- "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
python=.venv/bin/python
[ -x "$python" ] || python=python3
resolved=$(PYTHONPATH=$PWD "$python" configs/__init__.py "$config" "$@") || exit
eval "$resolved" # run_dir, and more that is not needed here
logs=$(realpath -m -- "$run_dir/logs")
place=rolemodel-$(basename -- "$run_dir")-$$
unset TMUX # of a session in which this was typed
tmux -L "$place" new-session -d -x 200 -y 50 -s run -c "$PWD" \
    "bash launch.sh $(printf '%q ' "$config" "$@"); echo exit \$?; exec bash" || exit 2
for role in trainer orchestrator inference; do
    tmux -L "$place" split-window -t run -c "$PWD" "tail -n +1 -F $(printf %q "$logs/$role.log")"
    tmux -L "$place" select-layout -t run tiled >/dev/null
done
tmux -L "$place" select-pane -t run:0.0
[ -t 1 ] && exec tmux -L "$place" attach
printf 'tmux -L %q attach\n' "$place"
