#!/bin/sh
# What the image runs: `gateway` with the arguments that it is given, and
#
#   serve            the model that the platform mounts: $GATEWAY_MODEL, SageMaker's /opt/ml/model or KServe's /mnt/models
#   serve MODEL ...  that one; on all addresses of the container, unless --host says otherwise
#   loadtest ...     the other program
#
# It becomes the gateway, which gets the platform's signals.
set -eu

fail() {
  echo "entrypoint: $1" >&2
  exit 2
}

mounted() {
  if [ -n "${GATEWAY_MODEL:-}" ]; then
    echo "$GATEWAY_MODEL"
    return
  fi
  sagemaker=${SAGEMAKER_BASE_DIR:-/opt/ml}/model
  for place in "$sagemaker" /mnt/models; do
    if [ -n "$(ls -A "$place" 2>/dev/null)" ]; then
      echo "$place"
      return
    fi
  done
  fail "no model: nothing is in $sagemaker (SageMaker) or /mnt/models (KServe): mount one there, or name it: serve MODEL"
}

# Other ports than the one for HTTP only from SageMaker's range, where it states one ("9000-9999").
port_for_grpc() {
  low=${SAGEMAKER_SAFE_PORT_RANGE:-9000}
  low=${low%%-*}
  case $low in
    '' | *[!0-9]*) fail "SAGEMAKER_SAFE_PORT_RANGE: '$SAGEMAKER_SAFE_PORT_RANGE': expected two ports, such as 9000-9999" ;;
  esac
  if [ "$low" = "$1" ]; then low=$((low + 1)); fi
  echo "$low"
}

case ${1:-} in
  loadtest) exec "$@" ;;
  gateway) shift ;;
esac
if [ "${1:-}" != serve ]; then
  exec gateway "$@"
fi
shift
case ${1:-} in
  -h | --help) exec gateway serve --help ;;
  '' | -*)
    model=$(mounted)
    http=${SAGEMAKER_BIND_TO_PORT:-8080}
    grpc=$(port_for_grpc "$http")
    set -- "$model" --http-port "$http" --grpc-port "$grpc" "$@"
    ;;
esac
case " $* " in
  *' --host '* | *' --host='*) ;;
  *) set -- "$@" --host 0.0.0.0 ;;
esac
exec gateway serve "$@"
