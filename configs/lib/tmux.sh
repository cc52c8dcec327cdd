# Sourced by launch.sh where TMUX=1: the same command in a tmux server of its own, beside a pane for each role's log. The
# panes stay after the run, to be read, until the session is left by Ctrl-b & or kill-server.
command -v tmux >/dev/null || { echo "[launch] exit=2 TMUX=1 needs tmux" >&2; exit 2; }
unset TMUX
place=rolemodel-$(basename -- "$RUN_DIR")-$$
tmux -L "$place" new-session -d -x 200 -y 50 -s run -c "$ROOT" "bash launch.sh $(printf '%q ' "${GIVEN[@]}"); echo exit \$?; exec bash" || exit 2
for role in trainer orchestrator inference; do
    tmux -L "$place" split-window -t run -c "$ROOT" "tail -n +1 -F $(printf %q "$LOGS/$role.log")"
    tmux -L "$place" select-layout -t run tiled >/dev/null
done
tmux -L "$place" select-pane -t run:0.0
rm -rf "$SCRATCH" # the session's launch.sh has its own
[ -t 1 ] && exec tmux -L "$place" attach
echo "[launch] tmux -L $place attach"
exit 0
