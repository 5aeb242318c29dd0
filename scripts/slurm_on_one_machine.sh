#!/usr/bin/env bash
# A SLURM of two make-believe nodes on this machine, to try submitit_launch.py on the real thing (Debian or Ubuntu, as root):
#
#     bash scripts/slurm_on_one_machine.sh install    # slurm-wlm and munge, by apt-get
#     bash scripts/slurm_on_one_machine.sh up         # then: export SLURM_CONF=/run/slurm-on-one-machine/slurm.conf
#     bash scripts/slurm_on_one_machine.sh down
#
# Nodes n1 and n2 have two make-believe GPUs each. Jobs in the partition `high` preempt those in `debug`, the default one. All
# that it writes lies in its own folder, beside one line in /etc/hosts: the configuration of another SLURM is left alone.
set -euo pipefail
home=/run/slurm-on-one-machine
export SLURM_CONF=$home/slurm.conf
hosts_line="127.0.0.1 n1 n2 # make-believe nodes of SLURM"

fail() {
    echo "slurm_on_one_machine.sh: $*" >&2
    exit 1
}

install_packages() {
    command -v apt-get >/dev/null || fail "install needs apt-get; elsewhere, install slurmctld, slurmd and munged by hand"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends slurm-wlm munge
}

# runs PID PROGRAM: not where the number is another program's by now, or the process is dead and nobody has asked for its end.
runs() { [ "$(cat "/proc/$1/comm" 2>/dev/null)" = "$2" ] && tr '\0' ' ' <"/proc/$1/cmdline" 2>/dev/null | grep -q .; }

# alive NAME: whether the daemon of the pid file $home/NAME.pid, such as slurmd.n1, runs.
alive() {
    local pid
    pid=$(cat "$home/$1.pid" 2>/dev/null) && runs "$pid" "${1%%.*}"
}

stop() {
    local pid
    alive "$1" || return 0
    pid=$(cat "$home/$1.pid") # it removes the file before it ends
    kill "$pid"
    for _ in $(seq 100); do runs "$pid" "${1%%.*}" && sleep 0.1 || return 0; done
    kill -9 "$pid"
}

munge_answers() { munge -n </dev/null 2>/dev/null | unmunge >/dev/null 2>&1; } # a process list would show dead ones, too

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
    grep -qxF "$hosts_line" /etc/hosts || echo "$hosts_line" >>/etc/hosts # a run's first node is met by its name
    # With device files a GPU can be asked for, and CUDA_VISIBLE_DEVICES is set; a mere count would make the nodes invalid.
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
# Jobs are followed by their processes' parents, and no cores or memory are assigned: a container may have no cgroups.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
# A job is started within a second. A requeued one waits until its credential has expired: 5 s, the least, for two minutes.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
AuthInfo=cred_expire=5
# Seconds from TERM to KILL, and until a node that does not answer is given up.
KillWait=10
SlurmdTimeout=10
ReturnToService=2
JobRequeue=1
# The nodes have what is written here, whatever the machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=17001 CPUs=4 RealMemory=4000 Gres=gpu:2
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=17002 CPUs=4 RealMemory=4000 Gres=gpu:2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=15
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF
CONF
}

up() {
    command -v slurmctld slurmd munged >/dev/null || fail "SLURM is not installed: run '$0 install'"
    [ -e "$SLURM_CONF" ] && alive slurmctld || configure
    if ! munge_answers; then
        install -d -o munge -g munge /run/munge
        runuser -u munge -- munged --force >/dev/null 2>&1 # --force: the folder of its log may be open to others
        within 10 munged munge_answers
        cp /run/munge/munged.pid "$home/munged.pid" # this one is ours to stop
    fi
    # No file may stay open in a daemon: who started this script would wait for its output to end. -c: no jobs of before.
    alive slurmctld || slurmctld -c >/dev/null 2>&1
    for node in n1 n2; do alive slurmd.$node || slurmd -N $node >/dev/null 2>&1; done
    within 30 "SLURM" nodes_answer
    echo "SLURM is up: export SLURM_CONF=$SLURM_CONF"
}

down() {
    [ -d "$home" ] || return 0
    if alive slurmctld; then
        squeue -h -o %i | xargs -r scancel # its processes would outlive the daemons
        for _ in $(seq 150); do [ -z "$(squeue -h -o %i)" ] && break || sleep 0.1; done
    fi
    for name in slurmd.n1 slurmd.n2 slurmctld munged; do stop $name; done
    { grep -vxF "$hosts_line" /etc/hosts || true; } >"$home.hosts" && cat "$home.hosts" >/etc/hosts # a mounted file cannot be moved
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
