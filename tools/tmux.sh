#!/usr/bin/env bash
# bash tools/tmux.sh config.toml [table.key=value ...]
# Runs launch.sh in a tmux server of its own, next to panes for the logs of trainer, orchestrator
# and first server. The panes stay after the run, so that they can be read, until you leave with Ctrl-b & or kill-server.
set -u
[ $# -ge 1 ] || { sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}"; exit 2; }
command -v tmux >/dev/null || { echo "there is no tmux: install it" >&2; exit 2; }
config=$(realpath -m -- "$1")
shift
CDPATH= cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit 2
python=.venv/bin/python
[ -x "$python" ] || python=python3
run_dir=$(PYTHONPATH=$PWD "$python" -c '
from rolemodel.config import load_config
from rolemodel.run_directory import run_directory
from sys import argv
try:
    print(run_directory(load_config(argv[1], argv[2:])))
except Exception as e:
    raise SystemExit(str(e))
' "$config" "$@") || exit 2
logs=$(realpath -m -- "$run_dir/logs")
server=rolemodel-$(basename -- "$run_dir")-$$
unset TMUX # that of the session in which this was typed
tmux -L "$server" new-session -d -x 200 -y 50 -s run -c "$PWD" \
    "bash launch.sh $(printf '%q ' "$config" "$@"); echo exit \$?; exec bash" || exit 2
for role in trainer orchestrator inference; do
    tmux -L "$server" split-window -t run -c "$PWD" "tail -n +1 -F $(printf %q "$logs/$role.log")"
    tmux -L "$server" select-layout -t run tiled >/dev/null
done
tmux -L "$server" select-pane -t run:0.0
[ -t 1 ] && exec tmux -L "$server" attach
printf 'tmux -L %q attach\n' "$server"
