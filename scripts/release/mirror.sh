#!/bin/sh
# Copies the images of this release into your registry by skopeo, with their digests, and names the registry in the files beside this one:
# sh mirror.sh REGISTRY/FOLDER [OPTION of skopeo copy]...
set -eu
cd "$(dirname "$0")"
die() { echo "mirror.sh: $1" >&2; exit 1; }
[ $# -ge 1 ] || die "name your registry and a folder in it: sh mirror.sh registry.example.com/team"
command -v skopeo >/dev/null || die "skopeo is missing: install it (apt-get install skopeo, or dnf install skopeo)"
registry=${1%/}
shift
exec 3>&1
while read -r layout image; do
  name=${image##*/}
  error=$(skopeo copy "$@" --all --preserve-digests "oci:$layout" "docker://$registry/${name%@*}" 2>&1 >&3 </dev/null) ||
    die "$registry doesn't take ${name%@*}: $(echo "$error" | tail -n 1 | sed 's/.*msg="\(.*\)"$/\1/; s/\\//g')"
  folder=${image%/*}
done < images.txt
find images.txt install*.yaml bundle -type f -exec sed -i "s,$folder/lockstep-,$registry/lockstep-,g" {} +
