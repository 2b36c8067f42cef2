# Sourced by the scripts of this folder that download: fetch URL FILE [SHA256].

# Downloads to FILE.part, going on where it stopped, and gives the file its name when it is whole. A file that is there
# with the right checksum is left as it is; without a checksum, one that is there is.
fetch() {
  local url=$1 file=$2 sum=${3:-} found
  if [ -f "$file" ]; then
    if [ -z "$sum" ] || [ "$(sha256 "$file")" = "$sum" ]; then
      echo "$file is there"
      return
    fi
    echo "$0: $file is there, but has not the SHA-256 $sum; remove it to fetch it again" >&2
    return 1
  fi
  mkdir -p "$(dirname "$file")"
  if command -v curl >/dev/null; then
    curl --fail --location --silent --show-error --retry 3 --continue-at - --output "$file.part" "$url" || failed "$url" $?
  elif command -v wget >/dev/null; then
    wget --quiet --tries 3 --continue --output-document "$file.part" "$url" || failed "$url" $?
  else
    echo "$0: needs curl or wget to fetch $url" >&2
    return 2
  fi
  found=$(sha256 "$file.part")
  if [ -n "$sum" ] && [ "$found" != "$sum" ]; then
    rm -f "$file.part"
    echo "$0: $url has the SHA-256 $found, expected $sum: the file was cut off or is another one; nothing was kept" >&2
    return 1
  fi
  mv "$file.part" "$file"
  echo "$file: $(wc -c <"$file") bytes, SHA-256 $found"
}

failed() {
  echo "$0: cannot fetch $1 (exit code $2 of the download); what has come is kept, run this again to go on" >&2
  exit 1
}

sha256() {
  sha256sum "$1" | cut -d ' ' -f 1
}

# help "$@": shows the comment at the head of the script where an option stands for the folder.
help() {
  case ${1:-} in
    -h | --help) sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    -*) echo "$0: $1 is no folder; see $0 --help" >&2; exit 2 ;;
  esac
}
