#!/bin/sh
# Make the virtual environment of one peer: benchmarks/peers/setup.sh {fedjax,pfl,fedlab,flower} [DIR]
# DIR is benchmarks/peers/.envs unless given. PYTHON names the interpreter (python3). torch comes first so that nothing replaces it.
set -eu
name=${1:?usage: setup.sh fedjax|pfl|fedlab|flower [DIR]}
where=${2:-$(dirname "$0")/.envs}/$name

install() { "$where/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
torch() { install torch==2.13.0 numpy==2.4.6; }

case $name in
fedjax | pfl | fedlab | flower) "${PYTHON:-python3}" -m venv "$where" ;;
*) echo "unknown peer $name; use fedjax, pfl, fedlab or flower" >&2 && exit 2 ;;
esac

case $name in
fedjax)
  install --no-deps fedjax==0.0.17
  install jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 dm-haiku==0.0.17 optax==0.2.8 msgpack==1.2.4 requests==2.34.2 scipy==1.17.1 absl-py==2.5.1
  ;;
pfl)
  torch
  install --no-deps pfl==0.6.0
  install 'dp-accounting>=0.4,<0.6' multiprocess 'packaging>=24,<26' 'prv-accountant>=0.2,<0.3' scipy==1.17.1
  ;;
fedlab)
  torch
  install --no-deps fedlab==1.3.0
  install pandas==3.1.1 scikit-learn==1.9.1 pynvml==13.0.1 tqdm==4.70.1 munch==4.0.0 pillow==13.0.0
  ;;
flower)
  torch
  install --no-deps flwr==1.42.0  # it asks for a newer certifi than every index has, and for uv, which a simulation does not use
  install ray==2.55.1 'protobuf>=5.28,<7' 'grpcio>=1.70,<2' 'grpcio-health-checking>=1.70,<2' 'cryptography>=50,<51' \
    'pycryptodome>=3.18,<4' 'iterators>=0.0.2,<0.0.3' 'typer>=0.13,<0.21' 'tomli>=2,<3' 'tomli-w>=1,<2' 'pathspec>=1.0.4,<2' \
    'prompt-toolkit>=3.0.52,<4' 'rich>=14,<15' 'pyyaml>=6.0.2,<7' 'requests>=2.33,<3' 'httpx>=0.28.1,<1' 'click>=8,<9' 'packaging>=24,<26' \
    'sqlalchemy[asyncio]>=2.0.45,<3' 'alembic>=1.18.1,<2' 'uvicorn>=0.49,<0.50' 'fastapi>=0.138,<0.139' 'starlette>=1.3.1,<1.4'
  ;;
esac
echo "$name is ready in $where"
