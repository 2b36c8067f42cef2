# Sourced by the download scripts: fetch URL FILE [SHA256].

# Downloads to FILE.part, resuming a partial download, and renames it when it is complete. An existing file
# with the right checksum is not downloaded again, nor is any existing file if no checksum is given.
fetch() {
  local url=$1 file=$2 sum=${3:-} found
  if [ -f "$file" ]; then
    if [ -z "$sum" ] || [ "$(sha256 "$file")" = "$sum" ]; then
      echo "$file exists"
      return
    fi
    echo "$0: $file exists, but its SHA-256 is not $sum; remove it to download it again" >&2
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
    echo "$0: $url has the SHA-256 $found, expected $sum: the download was truncated or the file has changed; it was removed" >&2
    return 1
  fi
  mv "$file.part" "$file"
  echo "$file: $(wc -c <"$file") bytes, SHA-256 $found"
}

failed() {
  echo "$0: cannot download $1 (exit code $2 of the download); run this script again to resume" >&2
  exit 1
}

sha256() {
  sha256sum "$1" | cut -d ' ' -f 1
}

# help "$@": prints the comment at the head of the script for -h and --help; refuses other options.
help() {
  case ${1:-} in
    -h | --help) sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    -*) echo "$0: $1 is not a folder; see $0 --help" >&2; exit 2 ;;
  esac
}
