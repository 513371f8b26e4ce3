#!/usr/bin/env bash
# benchmarks/peers/install.sh FOLDER {nixl|mooncake}: a peer in a venv of its own under FOLDER.
#
# Nothing is installed into the system: the few libraries that Mooncake wants and a plain machine lacks are
# unpacked from Debian's packages beside the venv. Re-runnable; quiet when nothing is to do.
set -euo pipefail
folder=${1:?usage: install.sh FOLDER PEER}; peer=${2:?usage: install.sh FOLDER PEER}
case $peer in
  nixl) packages="nixl==1.5.1 nixl-cu13==1.5.1" ;;
  mooncake) packages="mooncake-transfer-engine-non-cuda==0.3.13.post1" ;;
  *) echo "peer: expected nixl or mooncake, got $peer" >&2; exit 2 ;;
esac
venv=$folder/$peer; stamp=$venv/.stamp-$(echo "$packages" | tr ' =' '--')
[ -e "$stamp" ] && exit 0
mkdir -p "$venv"
exec 3>&1 >"$folder/$peer.log" 2>&1
trap 'status=$?; ((status)) && { tail -n 20 "$folder/$peer.log"; echo "installing $peer failed"; } >&3; exit $status' EXIT
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check install -q --no-deps $packages "numpy>=1.26"
if [ "$peer" = mooncake ] && ! ldconfig -p | grep -q libibverbs; then
  (cd "$venv" && apt-get download libibverbs1 librdmacm1 libnuma1 liburing2 libnl-3-200 libnl-route-3-200 &&
    for package in *.deb; do dpkg -x "$package" libs; done)
fi
touch "$stamp"
