"""Directed schedules: promises that were broken before this protocol, and cases that random schedules seldom reach.

Each is a script for `tests.simulation.schedules.replay`. `tests/simulation/test_cases.py` has the outcome of each; with
a mechanism of the protocol switched off, some of them violate a property (`tests.simulation.mechanisms`).
"""

from __future__ import annotations

_GIVEN_UP = """
until {0} wait
crash nightly/a#{1}
until {0} end
tick 300
"""

TWO_TRIES = """
spawn airflow nightly/a
until p1 POST trainjobs               # try 1: its worker is frozen before its create arrives
spawn airflow nightly/a
until p2 wait                         # try 2, after the heartbeat timeout, creates the job
do p1 ok POST trainjobs               # try 1 thaws
until p1 wait
"""

STOP_AFTER_GIVE_UP = f"""
spawn kfp nightly/a
{_GIVEN_UP.format("p1", 1)}
spawn kfp nightly/a
until p2 POST trainjobs
spawn kfpstop nightly/a suspend       # Terminate: SIGTERM before the launch of attempt 2 has returned
until p3 end
run p2                                # the create arrives after the stop
"""

STOP_OF_A_KILLED_LAUNCH = f"""
spawn kfp nightly/a
{_GIVEN_UP.format("p1", 1)}
spawn kfp nightly/a
until p2 POST trainjobs
spawn kfpstop nightly/a suspend
until p3 end
do p2 killafter POST trainjobs        # the create arrives after the stop, and its process is gone
"""

WAIT_FOR_GIVEN_UP = """
spawn cli nightly/a
until p1 wait
spawn wait nightly/a                  # a second waiter
until p2 wait
run p2
crash nightly/a#1
until p1 end                          # the job is suspended with its diagnosis, and never resumed
"""

TAKEN_BACK = """
world first_crash=False
spawn cli nightly/a
until p1 wait
end nightly/a#1 3
until p1 end
spawn cli nightly/a
until p2 wait                         # attempt 2 runs
takeback nightly/a#1                  # Trainer up to 2.3 takes Failed back when the JobSet is deleted
"""

DELETED_BEFORE_THE_RESUME = """
spawn airflow nightly/a
until p1 wait
kill p1
spawn cancel nightly/a suspend
until p2 end
spawn airflow nightly/a
until p3 PATCH trainjobs              # the next try is about to resume attempt 1
delete nightly/a#1                    # a person deletes it
"""

KILL_TOO_LATE = f"""
spawn airflow nightly/a
{_GIVEN_UP.format("p1", 1)}
spawn airflow nightly/a
{_GIVEN_UP.format("p2", 2)}
spawn airflow nightly/a               # attempts 1 and 2 were given up and are kept, suspended
until p3 POST trainjobs
do p3 killafter POST trainjobs        # attempt 3 is created; "mark failed" ends the process
spawn airflowstop nightly/a delete:3
until p4 end
"""

ADOPTED_BEFORE_THE_REAPER = """
world queue=True
spawn airflow nightly/a
until p1 wait
admit nightly/a#1
kill p1                               # the worker is lost
tick 3700
spawn reap nightly/a
until p2 DELETE trainjobs             # observed for 90 s, read again, found unattended
spawn airflow nightly/a
until p3 wait                         # the next try adopts the job
run p3
do p2 ok DELETE trainjobs             # with the version before the adoption
"""

SUSPENDED_BEFORE_THE_OPT_OUT = """
world leases=read
spawn airflow nightly/a
until p1 wait
kill p1
tick 3700
spawn reap nightly/a
until p2 PATCH trainjobs              # the reaper is about to suspend the job
spawn airflow nightly/a
until p3 PATCH trainjobs
do p2 ok PATCH trainjobs
run p3
"""

LATE_SUSPEND = """
spawn airflow nightly/a               # try 1 launches and defers
until p1 wait
kill p1                               # a person clears the task
spawn onkill nightly/a suspend:1      # the trigger applies on_kill_action="suspend"
until p2 PATCH trainjobs
spawn airflow nightly/a
until p3 wait                         # try 2 adopts the running job
do p2 ok PATCH trainjobs              # now the suspend arrives
"""

SUSPEND_AFTER_THE_NEXT_LAUNCH = """
spawn airflow nightly/a
until p1 wait
kill p1
spawn onkill nightly/a suspend:1
spawn airflow nightly/a
until p3 wait
until p2 end
"""

LATE_SUSPEND_OF_AN_OLDER_CANCEL = """
spawn airflow nightly/a
until p1 wait
spawn cancel nightly/a suspend
do p2 ok GET trainjobs
do p2 ok POST leases                  # its record is written, its suspend is on its way
spawn airflow nightly/a
until p3 wait                         # a launch after that cancel
run p3
spawn cancelref nightly/a suspend
run p4                                # a newer cancel suspends the job
run p2                                # the suspend of the older one arrives
run p3
"""

CANCEL_WITHOUT_WEBHOOKS = """
spawn airflow nightly/a
until p1 wait
webhooks {1}                          # each POST and PATCH of a TrainJob fails, a DELETE does not
spawn {0} nightly/a delete:1
until p2 end
kill p1
"""

VERDICT = """
world queue={0}
log ModuleNotFoundError: No module named 'lightning'
spawn kfp nightly/a
until p1 wait
admit nightly/a#1
crash nightly/a#1
until p1 end                          # it would fail again; in a queue the job is deleted
spawn kfp nightly/a
until p2 wait
"""

LAUNCH_AFTER_A_DELETION = """
world first_crash=False
spawn cli nightly/a
until p1 wait
end nightly/a#1 3
until p1 end
spawn cli nightly/a
until p2 wait                         # attempt 2 runs
delete nightly/a#1                    # kubectl, gc, a TTL
tick 60
spawn cli nightly/a
until p3 wait
"""

FROZEN_CREATE = """
world first_crash=False
spawn cli nightly/a
until p1 POST trainjobs               # it has looked: nothing was there
spawn cli nightly/a
until p2 wait
end nightly/a#1 3
until p2 end
spawn cli nightly/a
until p3 wait                         # attempt 2 runs
delete nightly/a#1
tick 60                               # nothing is left of attempt 1
do p1 ok POST trainjobs               # attempt 1 is created beside attempt 2
until p1 wait
"""

KILLED_AFTER_A_FROZEN_CREATE = FROZEN_CREATE.replace("do p1 ok POST", "do p1 killafter POST")

LAUNCH_AFTER_A_KILLED_CREATE = f"""
{KILLED_AFTER_A_FROZEN_CREATE}
spawn cli nightly/a
until p4 wait
"""

RETRIES_IN_A_QUEUE = """
world queue=True on_retry=True
spawn kfp nightly/a
until p1 wait
admit nightly/a#1
crash nightly/a#1 oom
until p1 end                          # the job is deleted, its reason is kept
spawn kfp nightly/a
until p2 wait
spawn kfp nightly/a
until p3 wait
spawn kfp nightly/a
until p4 wait
"""

QUOTA = """
spawn tune nightly/a
until p1 POST trainjobs
quota {0}                             # a ResourceQuota that others change at the same time
until p1 wait
"""

CANCELLED_TWICE_WITHOUT_LEASES = """
world leases=read
spawn airflow nightly/a
until p1 wait
spawn airflow nightly/a
spawn cancel nightly/a suspend
until p3 end
until p2 PATCH trainjobs              # has read the suspended job, and resumes it
spawn cancel nightly/a suspend
until p4 end
run p2
"""

OLDER_CANCEL_SUSPENDS_LAST = """
spawn airflow nightly/a
until p1 wait
spawn cancel nightly/a suspend
do p2 ok GET trainjobs
do p2 ok POST leases
spawn airflow nightly/a
run p3
spawn cancelref nightly/a suspend
run p4
run p2                                # its suspension does not replace the mark of the later cancel
resume nightly/a#1
spawn reap nightly/a
until p5 end
"""

SUSPEND_WITH_A_QUOTA = """
spawn cli nightly/a
until p1 wait
quota 4                               # three of patches that name a version
spawn cancel nightly/a suspend
until p2 end
"""

RESUMED_BY_A_PERSON = f"""
spawn cli nightly/a
{_GIVEN_UP.format("p1", 1)}
spawn cli nightly/a
until p2 wait                         # attempt 2 runs
run p2
resume nightly/a#1
"""

ADOPTED_BEFORE_IT_IS_REPLACED = """
world first_crash=False
spawn kfp nightly/a
until p1 wait
end nightly/a#1 3
spawn cancel nightly/a suspend
until p2 end                          # the failed job is suspended
spawn kfp nightly/a
until p3 POST trainjobs               # attempt 2, in place of the failed one
spawn kfpstop nightly/a cancel
until p4 end                          # of p3
takeback nightly/a#1
spawn kfp nightly/a
run p5                                # resumes attempt 1
run p3                                # attempt 2 is created, and suspended
"""

ADOPTED_BESIDE_A_KILLED_LAUNCH = (
    ADOPTED_BEFORE_IT_IS_REPLACED.rpartition("run p3")[0]
    + "do p3 killafter POST trainjobs  # attempt 2 is created, and runs\n"
)

ADOPTED_BEFORE_THE_SECOND_LOOK = """
spawn airflow nightly/a
until p1 POST trainjobs
spawn airflow nightly/a
do p2 ok GET leases                   # the cancel comes after it
spawn cancel nightly/a suspend
run p3
do p1 ok POST trainjobs
do p2 ok GET trainjobs
do p2 ok PATCH trainjobs              # adopts the job of p1, and reads no cancel any more
run p1
run p2
"""

RESUMED_AFTER_A_CANCEL = """
spawn cli nightly/a
until p1 wait
run p1
spawn cancel nightly/a suspend
until p2 end
tick 60
resume nightly/a#1                    # by a person
run p1
tick 120
run p1
spawn reap nightly/a
until p3 end
tick 60
run p1
"""

GIVEN_UP_RESUMED_AND_CANCELLED = """
spawn cli nightly/a
until p1 wait
run p1
crash nightly/a#1
until p1 end                          # gives it up
tick 100
resume nightly/a#1                    # by a person
tick 100
spawn cancel nightly/a suspend
until p2 end
tick 100
spawn cli nightly/a                   # continues the attempt that the cancel has suspended
until p3 wait
run p3
"""

_TEN_ATTEMPTS = "".join(
    f"spawn cli nightly/a\nuntil p{number} wait\nrun p{number}\n"
    f"crash nightly/a#{number}\nuntil p{number} end\ntick 300\n"
    for number in range(1, 10)
)
_DELETIONS = "do p11 ok DELETE trainjobs\n" * 11
ALL_OBJECTS_ARE_GONE = f"""
{_TEN_ATTEMPTS}
spawn cli nightly/a
until p10 wait
run p10                               # attempt 10 runs
spawn cancel nightly/a delete
do p11 ok GET trainjobs
do p11 ok DELETE trainjobs
do p11 ok POST leases
do p11 ok GET trainjobs
{_DELETIONS}spawn cli nightly/a
until p12 wait
run p12
"""

A_WEBHOOK_HANGS_BEFORE_A_DELETION = """
world keys=nightly/a,nightly/b
spawn airflow nightly/b
until p1 wait
run p1
crash nightly/b#1
until p1 end
tick 300
spawn airflow nightly/b
until p2 POST trainjobs
do p2 killlate POST trainjobs
delete nightly/b#1
tick 120
spawn kfp nightly/a
until p3 POST trainjobs
spawn cancel nightly/a suspend
until p4 end
do p3 killafter POST trainjobs        # a cancelled job that only a PATCH suspends
spawn airflow nightly/b
until p5 wait
run p5
late                                  # two active jobs of the other key
kill p5
webhooks hang
tick 10
spawn reap nightly/a
until p6 end
"""

KILL_WITH_A_RECORDED_REASON = """
world on_retry=True queue=True
spawn airflow nightly/a timeout
until p1 wait
run p1
tick 700
until p1 end
webhooks hang
spawn airflowstop nightly/a delete:1
until p2 end
tick 30
"""

RESUMED_DURING_A_CANCEL = """
spawn cli nightly/a
until p1 wait
run p1
suspend nightly/a#1
spawn cancelref nightly/a suspend
do p2 ok GET trainjobs
do p2 ok GET trainjobs                # shows that a person has suspended the job
resume nightly/a#1
run p2
"""

LOSER_HAS_A_WAITER = f"""
spawn cli nightly/a
until p1 POST trainjobs
spawn cli nightly/a
{_GIVEN_UP.format("p2", 1)}
spawn cli nightly/a
until p3 wait                         # attempt 2 runs
run p3
delete nightly/a#1
do p1 ok POST trainjobs               # attempt 1 again, in the same second: the lower number counts
until p1 wait
"""

DELIVERED_WHILE_FROZEN = """
spawn cli nightly/a
until p1 POST trainjobs
spawn cli nightly/a
until p2 wait
end nightly/a#1 0
until p2 end                          # complete and delivered
do p1 ok POST trainjobs
run p1
"""

NAME_OF_A_DELETED_JOB = """
world first_crash=False
spawn cli nightly/a
until p1 wait
end nightly/a#1 0
until p1 end
delete nightly/a#1                    # its JobSet outlives it for a while
spawn cli nightly/a
until p2 wait
"""

JOBSET_OF_A_DELETED_JOB = """
spawn kfp nightly/a
until p1 POST trainjobs               # it has looked for a JobSet of that name
spawn kfp nightly/a
until p2 wait
end nightly/a#1 0
until p2 end
tick 5
delete nightly/a#1
do p1 ok POST trainjobs               # the new job takes over the Complete of the JobSet
run p1
"""

JOBSET_THAT_IS_GONE = """
spawn airflow nightly/a
until p1 POST trainjobs
spawn airflow nightly/a
until p2 wait
end nightly/a#1 0
until p2 end
tick 5
ttl nightly/a#1
do p1 killafter POST trainjobs        # the new job takes over the Complete of the JobSet
tick 60                               # the JobSet is removed
spawn airflow nightly/a
"""

RANKS_OF_A_FAILED_ATTEMPT = """
world ranks=2 first_crash=False
spawn cli nightly/a
until p1 wait
end nightly/a#1 3                     # one rank has failed, the other one is being stopped
until p1 end
spawn cli nightly/a
run p2
"""

RANKS_OF_TWO_ATTEMPTS = """
world ranks=2 first_crash=False
spawn kfp nightly/a
run p1
spawn cancelref nightly/a delete
run p2
spawn kfp nightly/a
run p3
spawn kfp nightly/a
run p4                                # both wait for the ranks of attempt 1
tick 31
run p3                                # attempt 2 is created
tick 5
end nightly/a#2 3                     # and fails; its other rank is being stopped
"""

COMPLETE_BEYOND_A_GAP = """
world first_crash=False
spawn kfp nightly/a
until p1 wait
end nightly/a#1 3
until p1 end
spawn kfp nightly/a
until p2 wait
end nightly/a#2 0
until p2 end                          # an execution of KFP marks nothing as delivered
delete nightly/a#1
tick 60
spawn kfp nightly/a
until p3 wait
"""

FOREGROUND_ON_A_LOST_NODE = """
spawn cli nightly/a
until p1 wait
run p1
lose nightly/a#1
delete nightly/a#1 Foreground         # its deletion cannot end
run p1
"""

FAILED_BEFORE_THE_CANCEL = """
world first_crash=False
spawn cli nightly/a
until p1 wait
end nightly/a#1 3
until p1 end
spawn cancel nightly/a delete
until p2 end
takeback nightly/a#1
"""

FAILED_IN_A_QUEUE_BEFORE_THE_CANCEL = """
world queue=True
spawn cli nightly/a
run p1
admit nightly/a#1
cut p1
end nightly/a#1 3                     # the waiter does not see it
spawn cancel nightly/a suspend
run p2
takeback nightly/a#1                  # its Workload stays finished
tick 60
run p1
"""

GIVEN_UP_IN_A_QUEUE = """
world mix=outages queue=True
spawn cli nightly/a
run p1
admit nightly/a#1
end nightly/a#1 3
kill p1
spawn cli nightly/a
run p2
tick 31
run p2                                # attempt 2
takeback nightly/a#1
spawn cancelref nightly/a delete      # of attempt 2; its waiter does not wait for attempt 1 instead
"""

LATE_CREATE_OF_A_CANCELLED_LAUNCH = """
spawn cli nightly/a
until p1 POST trainjobs
spawn cancel nightly/a delete
do p1 late POST trainjobs
until p2 end
until p1 GET jobsets                  # its client has looked for the job, and repeats the create
late                                  # the first create arrives
run p1
"""

LATE_CREATE_BESIDE_THE_NEXT_ATTEMPT = """
world queue=True
spawn tune nightly/a
until p1 POST trainjobs
do p1 late POST trainjobs             # its client gives up, and sends it again
until p1 POST trainjobs
do p1 ok POST trainjobs
spawn cancelref nightly/a suspend     # deletes the job, since it is in a queue
run p2
run p1                                # attempt 2 is created
late                                  # the first create arrives
"""

FROZEN_FOR_LONGER_THAN_A_RECORD = """
spawn tune nightly/a
until p1 POST trainjobs
do p1 late POST trainjobs
spawn reap nightly/a
spawn cancel nightly/a delete
run p3
do p2 ok GET leases                   # the reaper knows the record, and has not looked at the jobs
late
tick 3700                             # launch and reaper are frozen; the record is kept for an hour
"""

FAILED_BEFORE_A_REFUSED_SUSPEND = """
world mix=outages
spawn kfp nightly/a
spawn tune nightly/b
run p1
kill p1
spawn kfp nightly/a
end nightly/a#1 3
runtime off                           # each change of the job is refused
spawn kfpstop nightly/a suspend
kill p3
tick
run p4
takeback nightly/a#1                  # runs until the reaper repeats the suspend
"""

REAPED_DURING_A_TIMEOUT = """
world mix=outages queue=True
spawn kfp nightly/a timeout
run p1
tick 600                              # its queue_timeout
until p1 POST leases
do p1 ok POST leases                  # its cancel; the DELETE has not arrived
spawn reap nightly/a
run p2
"""

ADOPTED_WHILE_CHANGES_ARE_REFUSED = """
world mix=outages
spawn kfp nightly/a
spawn reap nightly/a
run p1
webhooks hang
spawn cancelref nightly/a suspend
run p3
runtime off
spawn kfp nightly/a                   # a later launch
until p4 PATCH trainjobs
webhooks answer
do p4 ok PATCH trainjobs              # its adoption is refused, so that the job does not show it
"""

RESUMED_BEFORE_THE_REAPER = """
spawn kfp nightly/a
run p1
spawn kfpstop nightly/a suspend
do p2 ok GET trainjobs
do p2 killafter POST leases           # killed before it suspends the job
suspend nightly/a#1                   # by a person, who leaves no mark
resume nightly/a#1
"""

RESUMED_WITHOUT_LEASES = """
world leases=none
spawn kfp nightly/a
until p1 POST trainjobs
do p1 ok POST trainjobs
until p1 GET pods                     # it has looked again
spawn cancel nightly/a suspend
until p2 PATCH trainjobs
do p2 ok PATCH trainjobs
resume nightly/a#1                    # by a person
"""

SUSPENDED_IN_A_QUEUE_AFTER_ITS_END = """
world queue=True first_crash=False
spawn cli nightly/a
run p1
admit nightly/a#1
cut p1
end nightly/a#1 3
takeback nightly/a#1                  # its Workload stays finished
suspend nightly/a#1
run p1
"""

CREATE_WITHOUT_REPLY = """
spawn cli nightly/a
until p1 POST trainjobs
do p1 late POST trainjobs             # its client gives up, and sends it again
until p1 POST trainjobs
spawn cancel nightly/a suspend
until p2 end
run p1                                # created, and stopped
late                                  # the first one arrives
"""

LATE_CREATE_IN_A_QUEUE = """
world queue=True
spawn airflow nightly/a
until p1 GET jobsets
do p1 ok GET jobsets
do p1 late POST trainjobs             # its client gives up, and sends it again
spawn cancel nightly/a suspend
run p2
tick
run p1                                # created, and deleted: Kueue would resume a suspended job
late                                  # the first one arrives, under the free name
admit nightly/a#1
"""

RANKS_OF_A_NEW_JOB_AFTER_A_PAUSE = """
world mix=kfp
spawn kfp nightly/a
run p1
delete nightly/a#1 Foreground         # by a person
spawn kfp nightly/a
run p2                                # waits for the ranks of attempt 1
tick 31
do p2 ok GET trainjobs
tick 3700                             # is frozen; nothing of attempt 1 is left
spawn kfp nightly/a
run p3                                # a new attempt 1, under the free name
run p2
spawn kfpstop nightly/a cancel
do p4 ok GET trainjobs
do p4 ok POST leases
tick 3700                             # the stop is frozen, too, and then deletes the job
"""

RESUMED_AFTER_A_KILL = """
spawn airflow nightly/a
until p1 wait
spawn cancel nightly/a suspend
do p2 ok GET trainjobs
do p2 ok POST leases                  # its record is written, and it has stopped nothing yet
kill p2
spawn onkill nightly/a suspend:1
run p3                                # the kill suspends the job
resume nightly/a#1                    # a person starts it again, after both
spawn reap nightly/a
run p4
"""

ATTENDED_FOR_HOURS = """
spawn airflow nightly/a
until p1 wait
run p1
tick 1800
run p1
tick 1800
run p1
tick 1800
run p1
tick 1800
run p1
tick 1800
run p1
tick 100
run p1
"""

DELIVERED_BEFORE_THE_NEXT = """
spawn cli nightly/a
until p1 wait
end nightly/a#1 0
until p1 end                          # its result is delivered
spawn cli nightly/a
until p2 wait                         # attempt 2 is new work
"""

RUNTIME_GONE_BEFORE_A_STOP = """
world mix=outages
spawn airflow nightly/a
until p1 wait
runtime off
spawn {0} nightly/a suspend           # refused, and so is each other change: it deletes the job
until p2 end
"""

REAPED_LATE_AFTER_A_STOP = f"""{STOP_OF_A_KILLED_LAUNCH}
tick 1800                             # the record is kept for an hour
"""

FAILED_BEFORE_ITS_LAUNCH_OBEYS = """
world queue={0} first_crash=False
spawn tune nightly/a
until p1 POST trainjobs
spawn cancel nightly/a {1}
run p2                                # sees no job, and leaves its record
do p1 ok POST trainjobs
end nightly/a#1 3
run p1                                # sees the failed job and the record
takeback nightly/a#1
"""

FAILED_BEFORE_THE_REAPER = """
world queue={0} first_crash=False
spawn tune nightly/a
until p1 POST trainjobs
spawn cancel nightly/a {1}
run p2
do p1 killafter POST trainjobs
end nightly/a#1 3
spawn reap nightly/a
until p3 end                          # sees the failed job and the record
tick 3700                             # the record is kept for an hour
takeback nightly/a#1
"""

FAILED_BEFORE_IT_WAS_REPLACED = """
world first_crash=False
spawn kfp nightly/a
until p1 wait
spawn cancel nightly/a suspend
do p2 ok GET trainjobs
do p2 ok POST leases
end nightly/a#1 3
run p2                                # the failed job is suspended by the cancel
tick 31
run p1                                # reads that its job has failed
spawn kfp nightly/a
do p3 ok GET trainjobs
takeback nightly/a#1
until p3 wait                         # has created attempt 2 and deleted the one that came back
"""

TAKEN_OVER_BESIDE_ANOTHER = """
spawn kfp nightly/a
until p1 POST trainjobs               # frozen before its create arrives
spawn kfp nightly/a
spawn kfp nightly/a
until p2 wait
end nightly/a#1 0
tick 5
delete nightly/a#1                    # by a person; p1 creates a job of the name, which takes over the JobSet
"""

READ_AS_FAILED_BY_A_LIST = """
spawn kfp nightly/a
until p1 wait
end nightly/a#1 3
do p1 ok GET trainjobs                # the list of its watch shows that the job has failed
spawn cancel nightly/a suspend
until p2 end
spawn kfp nightly/a
until p3 POST trainjobs
takeback nightly/a#1
"""

EDITED_AFTER_A_CANCEL = """
world edited=3
spawn airflow nightly/a
until p1 wait
spawn cancel nightly/a suspend
until p2 end
spawn airflow nightly/a               # with another spec
until p3 wait
"""

EDITED_BESIDE_A_CANCEL = """
world edited=2
spawn airflow nightly/a
until p1 wait
spawn kfp nightly/a                   # with another spec
do p2 ok GET leases                   # no cancel yet
spawn cancel nightly/a suspend
until p3 end
run p2                                # sees the job that the cancel has just suspended
"""

RESUMED_AFTER_THE_NEXT_ONE_WAS_GIVEN_UP = """
spawn cli nightly/a
run p1
crash nightly/a#1
watch p1 pods
tick
tick 31
run p1                                # gives attempt 1 up
tick
spawn cli nightly/a
run p2                                # attempt 2, in its place
resume nightly/a#1                    # by a person
spawn wait nightly/a                  # for attempt 1, which runs
crash nightly/a#2 oom                 # p2 gives attempt 2 up
"""

RESUMED_BESIDE_A_CANCELLED_ONE = """
spawn kfp nightly/a
until p1 wait
end nightly/a#1 3
spawn cancel nightly/a suspend
until p2 end
spawn kfp nightly/a
until p3 POST trainjobs
spawn kfpstop nightly/a cancel
until p4 end
takeback nightly/a#1
run p3                                # suspends both attempts
resume nightly/a#1                    # by a person, while p1 waits for it
"""

RESUMED_BEFORE_THE_REAPER = (
    RESUMED_BESIDE_A_CANCELLED_ONE + "spawn reap nightly/a\nrun p5  # p1 has not written its Lease yet\n"
)

RESUMED_BY_A_LAUNCH_WITHOUT_LEASES = """
world leases=none
spawn kfp nightly/a
until p1 POST trainjobs
spawn cancel nightly/a suspend
spawn kfp nightly/a
do p3 ok GET trainjobs                # the cancel suspends the job beside this launch, which sees that
"""

LATE_RENEWAL_OF_A_LEASE = """
spawn cli nightly/a
run p1
tick 120
tick 3700                             # its renewal was sent an hour ago
run p1
spawn reap nightly/a
until p2 end                          # and no other one is answered
"""

LATE_CREATE_DURING_A_LOOK = """
spawn cli nightly/a
until p1 POST trainjobs
spawn cancel nightly/a delete
do p1 late POST trainjobs
until p2 end
until p1 GET jobsets
spawn cancel nightly/a delete
do p1 ok GET jobsets
do p1 ok POST trainjobs
run p3                                # deletes the job of the second create
do p1 ok GET trainjobs                # the first create arrives between this and the read of the cancels
"""

LATE_CREATE_OF_AN_EARLIER_LAUNCH = """
world deferrable=True
spawn airflow nightly/a
do p1 ok GET jobsets
do p1 ok GET pods
do p1 ok GET leases
do p1 ok GET trainjobs
do p1 late POST trainjobs
tick 31
do p1 ok GET trainjobs
do p1 ok GET jobsets
do p1 ok POST trainjobs
delete nightly/a#1
run p1                                # begins again when its ranks have ended; then the first create arrives
tick
"""

LATE_CREATE_OF_A_LOSER = """
spawn cli nightly/a
until p1 POST trainjobs
spawn cli nightly/a
do p1 late POST trainjobs
until p2 wait
end nightly/a#1 3
spawn cli nightly/a
until p3 wait
delete nightly/a#1
tick 60
until p1 wait                         # its second create made attempt 1, which it has ended in favor of attempt 2
spawn cancel nightly/a suspend
run p4                                # then the first create arrives
"""

TAKEN_OVER_AND_DELETED = """
spawn airflow nightly/a
until p1 POST trainjobs
spawn airflow nightly/a
until p2 wait
end nightly/a#1 0
ttl nightly/a#1
do p1 killafter POST trainjobs        # in the same second: takes over its end
tick 60
spawn cancel nightly/a suspend
spawn airflow nightly/a
do p4 ok GET trainjobs
do p4 ok GET leases
do p4 ok GET trainjobs
delete nightly/a#1
"""

TAKEN_OVER_BESIDE_A_COMPLETE_ONE = """
spawn kfp nightly/a
until p1 POST trainjobs
spawn kfp nightly/a
spawn kfp nightly/a
until p2 wait
end nightly/a#1 0
delete nightly/a#1
run p3
end nightly/a#2 0
"""

EXAMPLES = (
    *(text for name, text in [*vars().items()] if name.isupper() and isinstance(text, str) and "{" not in text),
    CANCEL_WITHOUT_WEBHOOKS.format("cancel", "refuse"),
    CANCEL_WITHOUT_WEBHOOKS.format("kfpstop", "hang"),
    VERDICT.format(False),
    VERDICT.format(True),
    QUOTA.format(3),
    RUNTIME_GONE_BEFORE_A_STOP.format("cancel"),
    FAILED_BEFORE_ITS_LAUNCH_OBEYS.format(False, "suspend"),
    FAILED_BEFORE_ITS_LAUNCH_OBEYS.format(False, "delete"),
    FAILED_BEFORE_ITS_LAUNCH_OBEYS.format(True, "delete"),
    FAILED_BEFORE_THE_REAPER.format(False, "suspend"),
)
"""Each script, those with gaps filled: what `tests.simulation.variations` varies."""

# Not among the examples: properties do not know the request that a step has prepared as a stop.
LATE_SIGTERM = """
spawn kfp nightly/a
until p1 wait
spawn kfpsigterm nightly/a suspend
until p2 PATCH trainjobs
kill p1
spawn kfp nightly/a
until p3 wait                         # the next run of the step adopts the running job
do p2 ok PATCH trainjobs              # now the suspend arrives
"""
