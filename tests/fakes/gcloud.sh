#!/bin/bash
# A stand-in for gcloud: notes what it is asked, lets groups of instances be there once created, and
# runs here what is meant for an instance. $CLOUD is its state; a test's $CLOUD/fault goes first.
all=$*
printf '%s\n' "$all" >>"$CLOUD/calls"
once() { mkdir "$CLOUD/once-$1" 2>/dev/null; }
# shellcheck source=/dev/null
[ ! -e "$CLOUD/fault" ] || . "$CLOUD/fault"
case $all in
    'compute instance-groups managed describe '*) [ -e "$CLOUD/$5" ] ;;
    *' describe '*) exit 1 ;;
    'compute instance-groups managed create '*)
        size=${all##*--size=}
        echo "${size%% *}" >"$CLOUD/$5"
        ;;
    'compute instance-groups managed list-instances '*)
        for ((i = 0; i < $(cat "$CLOUD/$5"); i++)); do echo "$5-$i"; done
        ;;
    'compute ssh '*)
        command=${all##*--command=}
        case $command in sudo*) exit 0 ;; esac
        exec bash -c "$command"
        ;;
esac
