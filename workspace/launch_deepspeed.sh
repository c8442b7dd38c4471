#!/bin/sh
# ./launch_deepspeed.sh [SCRIPT [ARGUMENTS…]]: run a DeepSpeed script on all nodes of this dev environment, from a shell in any of its pods.
# Without SCRIPT: train_multi_node.py. Ctrl-C stops all ranks; the exit code is that of the rank that failed first.
# As DeepSpeed's own launcher, it gives --deepspeed_config to a script that mentions it (--local_rank: the agents do). No ssh, pdsh or hostfile is used.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
agent=${LOCKSTEP_AGENT:-/lockstep/agent.pyz}
script=${1:-train_multi_node.py}
[ $# -eq 0 ] || shift

if [ ! -f "$agent" ]; then
    echo "launch_deepspeed.sh: there is no $agent: this is for pods of a dev environment; elsewhere use torchrun" >&2
    exit 1
fi
[ -f "$script" ] || cd "$here"
if [ ! -f "$script" ]; then
    echo "launch_deepspeed.sh: there is no $script in $here: 'lockstep sync' sends your workspace" >&2
    exit 1
fi

if grep -q -e deepspeed_config -e add_config_arguments "$script" && [ -f "$here/ds_config.json" ]; then
    case " $* " in
    *" --deepspeed_config"*) ;;
    *) set -- "$@" "--deepspeed_config=$here/ds_config.json" ;;
    esac
fi
exec python3 "$agent" run -- "$script" "$@"
