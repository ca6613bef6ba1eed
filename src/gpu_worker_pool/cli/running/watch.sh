# Runs on the host of a remote command while the connection lives: sends signals to the command, and ends it when the
# connection is gone. POSIX sh, because nothing else is certain to be there.
# Arguments: the folder of this run, and the seconds of silence after which the connection counts as gone.
folder=$1
silence=$2
mark=GPU_POOL_RUN_MARK=${folder##*-}
end_seconds=10
orphan_seconds=5
# The end of stdin is the end of the connection. A hangup must not end us first, nor an answer that finds no reader.
trap "" HUP INT QUIT TERM PIPE

# The command and what it started, by the mark in their environment.
processes() {
  grep -lsF "$mark" /proc/[0-9]*/environ | while IFS=/ read -r _ _ pid _; do
    echo "$pid"
  done
}

short_sleep() {
  sleep 0.1 2> /dev/null || sleep 1
}

# Until none of them is left, at most so many seconds.
until_gone() {
  deadline=$(($(date +%s) + $1))
  while [ -n "$(processes)" ] && [ "$(date +%s)" -le "$deadline" ]; do
    short_sleep
  done
}

send() { # a signal to processes
  signal=$1
  shift
  [ $# = 0 ] || kill -s "$signal" -- "$@" 2> /dev/null
}

end_command() {
  rm -f "$folder/run" # what has not begun must not begin
  send TERM $(processes)
  send CONT $(processes)
  until_gone "$end_seconds"
  send KILL $(processes)
  until_gone "$orphan_seconds"
}

# The pid of the command, which may be about to begin.
command_pid() {
  tries=0
  pid=
  until read -r pid 2> /dev/null < "$folder/pid" && [ -n "$pid" ]; do
    tries=$((tries + 1))
    [ "$tries" -le 50 ] || return 1
    short_sleep
  done
  [ ! -e "$folder/status" ] && echo "$pid"
}

end_when_silent() {
  while :; do
    sleep "$silence" &
    echo $! > "$folder/sleep"
    wait $!
    if [ ! -e "$folder/beat" ]; then
      end_command
      rm -rf "$folder"
      kill -s KILL $$ # the shell around this function, which waits for a line
      exit
    fi
    rm -f "$folder/beat"
  done
}

: > "$folder/beat"
end_when_silent < /dev/null > /dev/null 2>&1 &
helpers=$!
# Says at once how the command has ended: what it left behind may keep its session open.
mkfifo "$folder/done"
{ read -r status && printf "gpu-pool-watch status %s\n" "$status"; } < "$folder/done" 2> /dev/null &
helpers="$helpers $!"
printf "gpu-pool-watch ready\n"
answer=
while read -r word argument; do
  case $word in
    beat) : > "$folder/beat" ;;
    signal) send "$argument" $(command_pid) ;;
    group)
      pid=$(command_pid)
      read -r leader 2> /dev/null < "$folder/leader"
      send "$argument" "-$leader" || send "$argument" $pid
      ;;
    over) # the session of the command has ended; with a signal for what it left behind, or -
      status=-
      read -r status 2> /dev/null < "$folder/status" || end_command
      if [ "$argument" != - ] && [ -n "$(processes)" ]; then
        send "$argument" $(processes)
        until_gone "$orphan_seconds"
      fi
      answer="ended $status"
      break
      ;;
  esac
done
[ -n "$answer" ] || end_command
printf "gpu-pool-watch %s\n" "$answer $(processes | tr "\n" " ")"
send KILL $helpers $(cat "$folder/sleep" 2> /dev/null)
rm -rf "$folder"
