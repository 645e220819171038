#!/usr/bin/env bash
# machines.sh COMMAND [ARGUMENT...]: run COMMAND on NODES (default 2) pretended machines at once, wait for all of them.
#
# Each has its own network (10.77.0.1, .2, ... on eth0), hostname (node0, ...), processes, System V memory, /dev/shm and
# /tmp; the file system is shared otherwise (KEEP names directories of /tmp that all see; PRIVATE others to be empty).
# COMMAND finds NODE_RANK, NODES, NODE_IP and MASTER_IP in its environment. The exit code is the first that is not 0.
#
# Everything lives in one outer PID namespace: when it ends, also by kill -9, the kernel ends all processes and removes
# all interfaces, so there is nothing to clean up. Works as root, and unprivileged where user namespaces are allowed.
# Exit code 77: namespaces are not allowed here.
set -u
NODES=${NODES:-2}
if [ -z "${MACHINES_INSIDE:-}" ]; then
    user=()
    [ "$(id -u)" = 0 ] || user=(--user --map-root-user)
    outer=(unshare "${user[@]}" --net --mount --pid --fork --kill-child --mount-proc)
    "${outer[@]}" -- sh -c 'ip link add probe0 type veth peer name probe1' 2>/dev/null || {
        echo "no namespaces here: they need root with CAP_SYS_ADMIN and CAP_NET_ADMIN, or user namespaces" >&2
        exit 77
    }
    MACHINES_INSIDE=1 exec "${outer[@]}" -- bash "$0" "$@"
fi

node() { # rank command...: the init of a machine
    local rank=$1
    shift
    until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
    hostname "node$rank"
    mount --make-rprivate /
    local stash=/mnt # any directory that exists: the mount is this machine's own
    mount -t tmpfs tmpfs "$stash"
    for path in ${KEEP:-}; do mkdir -p "$stash$path" && mount --rbind "$path" "$stash$path"; done
    mkdir -p "$stash/tmp" && chmod 1777 "$stash/tmp" && mount --rbind "$stash/tmp" /tmp
    mount -t tmpfs tmpfs /dev/shm
    for path in ${PRIVATE:-}; do mount -t tmpfs tmpfs "$path"; done
    ip link set lo up
    ip addr add "10.77.0.$((rank + 1))/24" dev eth0
    ip link set eth0 up
    unset MACHINES_INSIDE
    export NODE_RANK=$rank NODES NODE_IP="10.77.0.$((rank + 1))" MASTER_IP=10.77.0.1
    cd "$START_DIR" || exit 1
    "$@" & # not exec: the init of a machine takes no signal that it has not asked for
    wait $!
    exit $?
}

if [ "${1:-}" = --node ]; then
    shift
    node "$@"
fi

export START_DIR=$PWD
mount --make-rprivate /
pids=()
for ((rank = 0; rank < NODES; rank++)); do
    unshare --net --uts --ipc --mount --pid --fork --kill-child --mount-proc -- bash "$0" --node "$rank" "$@" &
    pids+=($!)
done
for ((rank = 0; rank < NODES; rank++)); do # a machine's network exists once unshare has left this one
    until [ "$(readlink "/proc/${pids[rank]}/ns/net")" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
done
# A switch, not a direct link: that would vanish at both ends when one machine does.
ip link add switch type bridge && ip link set switch up
for ((rank = 0; rank < NODES; rank++)); do
    ip link add "port$rank" type veth peer name eth0 netns "${pids[rank]}"
    ip link set "port$rank" master switch && ip link set "port$rank" up
done
status=0
for pid in "${pids[@]}"; do
    wait "$pid"
    code=$?
    [ "$status" != 0 ] || status=$code
done
exit "$status"
