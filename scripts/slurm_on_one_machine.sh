#!/usr/bin/env bash
# Starts a real SLURM with two simulated nodes on this machine, to try submitit_launch.py (Debian or Ubuntu, as root):
#
#     bash scripts/slurm_on_one_machine.sh install    # installs slurm-wlm and munge with apt-get
#     bash scripts/slurm_on_one_machine.sh up         # then: export SLURM_CONF=/run/slurm-on-one-machine/slurm.conf
#     bash scripts/slurm_on_one_machine.sh down
#
# The nodes n1 and n2 have two simulated GPUs each. Jobs in the partition `high` preempt those in `debug`, the default
# one. The script writes to its own folder, and adds one line to /etc/hosts. It does not change the configuration of
# another SLURM.
set -euo pipefail
home=/run/slurm-on-one-machine
export SLURM_CONF=$home/slurm.conf
hosts_line="127.0.0.1 n1 n2 # simulated nodes of SLURM"

fail() {
    echo "slurm_on_one_machine.sh: $*" >&2
    exit 1
}

install_packages() {
    command -v apt-get >/dev/null || fail "install needs apt-get; without it, install slurmctld, slurmd and munged"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends slurm-wlm munge
}

# runs PID PROGRAM: whether the process runs this program and is no zombie.
runs() { [ "$(cat "/proc/$1/comm" 2>/dev/null)" = "$2" ] && tr '\0' ' ' <"/proc/$1/cmdline" 2>/dev/null | grep -q .; }

# alive NAME: whether the daemon of $home/NAME.pid runs. NAME is slurmctld, slurmd.n1, ...
alive() {
    local pid
    pid=$(cat "$home/$1.pid" 2>/dev/null) && runs "$pid" "${1%%.*}"
}

stop() {
    local pid
    alive "$1" || return 0
    pid=$(cat "$home/$1.pid") # the daemon removes this file before it ends
    kill "$pid"
    for _ in $(seq 100); do runs "$pid" "${1%%.*}" && sleep 0.1 || return 0; done
    kill -9 "$pid"
}

munge_answers() { munge -n </dev/null 2>/dev/null | unmunge >/dev/null 2>&1; } # a process list may show zombies

# within SECONDS WHAT COMMAND...: waits until the command succeeds.
within() {
    local seconds=$1 what=$2
    shift 2
    for _ in $(seq $((5 * seconds))); do "$@" && return || sleep 0.2; done
    fail "$what did not come up in $seconds s; see the logs in $home"
}

nodes_answer() { [ "$(sinfo -h -N -p debug -o %T 2>/dev/null | grep -cE '^(idle|mixed|allocated|completing)$')" = 2 ]; }

configure() {
    local host
    host=$(hostname -s)
    mkdir -p "$home"/{state,n1,n2}
    grep -qxF "$hosts_line" /etc/hosts || echo "$hosts_line" >>/etc/hosts # ranks connect to the first node by its name
    # GPUs need device files here: nodes with a mere count of GPUs are invalid.
    printf 'Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n' >"$home/gres.conf"
    cat >"$SLURM_CONF" <<CONF
ClusterName=one-machine
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$home/state
SlurmdSpoolDir=$home/%n
SlurmctldPidFile=$home/slurmctld.pid
SlurmdPidFile=$home/slurmd.%n.pid
SlurmctldLogFile=$home/slurmctld.log
SlurmdLogFile=$home/slurmd.%n.log
SlurmctldPort=16817
# Without cgroups, which a container may lack: track processes by their parents, and bind no cores or memory.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
# Start jobs within a second. A requeued job waits until its credential expires: 5 s, the minimum, instead of 120 s.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
AuthInfo=cred_expire=5
# Seconds from TERM to KILL, which a busy machine may need for a save, and until a node without an answer is down.
KillWait=300
SlurmdTimeout=30
ReturnToService=2
JobRequeue=1
# Use the CPUs and the memory below, not those of the machine.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=17001 CPUs=4 RealMemory=4000 Gres=gpu:2
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=17002 CPUs=4 RealMemory=4000 Gres=gpu:2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=300
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF
CONF
}

up() {
    local daemon
    for daemon in slurmctld slurmd munged; do
        command -v $daemon >/dev/null || fail "$daemon is not installed: run '$0 install'"
    done
    [ -e "$SLURM_CONF" ] && alive slurmctld || configure
    if ! munge_answers; then
        install -d -o munge -g munge /run/munge
        runuser -u munge -- munged --force >/dev/null 2>&1 # --force: accept any permissions of its log folder
        within 10 munged munge_answers
        cp /run/munge/munged.pid "$home/munged.pid" # so that `down` stops it
    fi
    # Redirect the output, or a caller that reads it would wait for the daemons. -c: forget earlier jobs.
    alive slurmctld || slurmctld -c >/dev/null 2>&1
    for node in n1 n2; do alive slurmd.$node || slurmd -N $node >/dev/null 2>&1; done
    within 30 "SLURM" nodes_answer
    echo "SLURM is up: export SLURM_CONF=$SLURM_CONF"
}

down() {
    [ -d "$home" ] || return 0
    if alive slurmctld; then
        squeue -h -o %i | xargs -r scancel # processes of jobs would outlive the daemons
        for _ in $(seq 150); do [ -z "$(squeue -h -o %i)" ] && break || sleep 0.1; done
    fi
    for name in slurmd.n1 slurmd.n2 slurmctld munged; do stop $name; done
    # Write to the file: in a container it is mounted and cannot be replaced.
    { grep -vxF "$hosts_line" /etc/hosts || true; } >"$home.hosts" && cat "$home.hosts" >/etc/hosts
    rm -rf "$home" "$home.hosts"
}

case ${1:-} in
    install | up | down) [ "$(id -u)" = 0 ] || fail "$1 must be run as root" ;;
    *) fail "say install, up or down" ;;
esac
case $1 in
    install) install_packages ;;
    *) "$1" ;;
esac
