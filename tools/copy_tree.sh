#!/usr/bin/env bash
# copy_tree.sh DIRECTORY: copies this checkout there without what is built, as git would clone it; times are kept, so that
# make sees nothing to do again. Files that git does not know yet come along, those that it ignores do not.
set -euo pipefail
mkdir -p "$1"
target=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' path; do
    if [ -e "$path" ]; then printf '%s\0' "$path"; fi # a file that was deleted and is not committed yet
done | xargs -0 cp --parents --preserve=mode,timestamps -t "$target"
