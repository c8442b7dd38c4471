#!/bin/sh
# Send workspace/ to all pods of the dev environment: scripts/sync-multi-node.sh [JOB] [--watch] [--force]
# CLUSTER names the cluster file; default: the one in use (lockstep use), else local.
set -eu
cd "$(dirname "$0")/.."
cluster=${CLUSTER:-$(cat "${LOCKSTEP_STATE:-.lockstep}/cluster" 2>/dev/null || echo local)}
job=ml-dev-env
case ${1:-} in
    "" | -*) ;;
    *) job=$1; shift ;;
esac
exec .venv/bin/lockstep sync "$job" workspace --cluster "$cluster" "$@"
