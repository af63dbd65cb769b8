#!/usr/bin/env bash
# Make an environment for each library that can't share Murano's: benchmarks/peers.sh [FOLDER] [PEER…]
#
# FOLDER is MURANO_PEERS or ~/.cache/murano/peers if it is not given. Each takes about 1.5 GB. PYTHON names another interpreter.
# torch is pinned: a looser requirement makes pip fetch a CUDA build of several GB.
set -euo pipefail

folder="${1:-${MURANO_PEERS:-$HOME/.cache/murano/peers}}"
[ $# -gt 0 ] && shift
peers=("$@")
[ ${#peers[@]} -gt 0 ] || peers=(transformer-lens interp-engine murano-interp)
python="${PYTHON:-python3}"
torch="torch==${TORCH_VERSION:-2.13.0}"

unset PYTHONPATH
mkdir -p "$folder"
cd "$folder" # not in the repository: a folder "murano" there would be imported for the package of that name

for peer in "${peers[@]}"; do
  case "$peer" in
    transformer-lens) packages=("transformer-lens==4.3.0") check="import transformer_lens.model_bridge" ;;
    interp-engine) packages=("interp-engine==1.14.2") check="import interp_engine" ;;
    # its nnterp can't be imported beside nnsight 0.8
    murano-interp) packages=("murano-interp==0.1.0a2" "nnsight>=0.6,<0.8") check="from murano import LogitLens, MuranoModel" ;;
    *) echo "unknown peer: $peer (there are: transformer-lens interp-engine murano-interp)" >&2; exit 2 ;;
  esac
  echo "== $peer in $folder/$peer"
  rm -rf "${folder:?}/$peer"
  if "$python" -m venv "$peer" \
    && "$peer/bin/python" -m pip install --quiet "$torch" "${packages[@]}" \
    && "$peer/bin/python" -c "$check"; then
    "$peer/bin/python" -m pip freeze > "$peer.txt"
  else
    echo "   could not be installed; it is left out of the benchmark" >&2
    rm -rf "${folder:?}/$peer"
  fi
done
