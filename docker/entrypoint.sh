#!/bin/sh
# What the image runs: `gateway` with the arguments that it is given, and
#
#   serve            the model that the platform mounts: $GATEWAY_MODEL, SageMaker's /opt/ml/model (as `gateway sagemaker`, with
#                    one port) or KServe's /mnt/models; with SAGEMAKER_MULTI_MODEL=true what SageMaker loads later
#   serve MODEL ...  that one; on all addresses of the container, unless --host says otherwise
#   loadtest ...     the other program
#
# It becomes the gateway, which gets the platform's signals.
set -eu

fail() {
  echo "entrypoint: $1" >&2
  exit 2
}

sagemaker=${SAGEMAKER_BASE_DIR:-/opt/ml}/model

mounted() {
  if [ -n "${GATEWAY_MODEL:-}" ]; then
    echo "$GATEWAY_MODEL"
    return
  fi
  for place in "$sagemaker" /mnt/models; do
    if [ -d "$place" ] && { [ ! -r "$place" ] || [ ! -x "$place" ]; }; then
      fail "$place: cannot be read by user $(id -u): expected a folder that it may read: chmod it there, or docker run --user"
    fi
    if [ -n "$(ls -A "$place" 2>/dev/null | grep -vx lost+found)" ]; then # which each volume of ext4 has
      echo "$place"
      return
    fi
  done
  fail "no model: nothing is in $sagemaker (SageMaker) or /mnt/models (KServe): mount one there, or name it: serve MODEL"
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
    case ${SAGEMAKER_MULTI_MODEL:-} in
      [Tt]rue | TRUE) exec gateway sagemaker serve --model "$sagemaker" "$@" ;;
    esac
    model=$(mounted)
    if [ "$model" = "$sagemaker" ]; then
      exec gateway sagemaker serve --model "$model" "$@"
    fi
    set -- "$model" --http-port 8080 --grpc-port 9000 "$@"
    ;;
esac
exec gateway serve --host 0.0.0.0 "$@" # a later --host wins
