#!/bin/sh
# tinyshakespeare as token shards: tiny_shakespeare_{train,val,all}.bin in dev/data/tinyshakespeare.
#
#     dev/data/tinyshakespeare.sh                       # downloads 1.1 MB with curl or wget
#     dev/data/tinyshakespeare.sh --text input.txt      # without a network: the same file from elsewhere
#
# _all holds the whole text, 338,025 GPT-2 tokens; _val its first 32,768 and _train the rest.
set -eu

url=https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
sha256=86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
tokens=338025
val_tokens=32768

die() {     # what is wrong, and a hint
    printf 'error: %s\n' "$1" >&2
    [ $# -lt 2 ] || printf 'hint: %s\n' "$2" >&2
    exit 1
}

root=$(cd "$(dirname "$0")/../.." && pwd)
out=$root/dev/data/tinyshakespeare
tokenize=$root/build/tokenize
text=
while [ $# -gt 0 ]; do
    case $1 in
        --text | --out | --tokenize)
            [ $# -ge 2 ] || die "$1 needs a value"
            case $1 in --text) text=$2 ;; --out) out=$2 ;; --tokenize) tokenize=$2 ;; esac
            shift 2 ;;
        --help)
            echo "usage: $0 [--text FILE] [--out FOLDER] [--tokenize TOOL]"
            sed -n '2,7s/^#//p' "$0"
            exit 0 ;;
        *) die "unknown argument '$1': there are --text FILE, --out FOLDER, --tokenize TOOL and --help" ;;
    esac
done

is_shakespeare() {
    [ -r "$1" ] && [ "$(sha256sum < "$1" | cut -d ' ' -f 1)" = $sha256 ]
}

mkdir -p "$out" || die "cannot create the folder '$out'"
if [ -z "$text" ]; then
    text=$out/tiny_shakespeare.txt
    if ! is_shakespeare "$text"; then
        echo "downloading $url"
        if command -v curl > /dev/null; then
            curl -sSfL --connect-timeout 20 -o "$text.part" "$url" || rm -f "$text.part"
        elif command -v wget > /dev/null; then
            wget -q -T 20 -t 2 -O "$text.part" "$url" || rm -f "$text.part"
        else
            die "neither curl nor wget is here to download $url"
        fi
        [ -e "$text.part" ] || die "no download" "fetch $url elsewhere, then $0 --text FILE"
        mv "$text.part" "$text"
    fi
fi
[ -r "$text" ] || die "cannot read '$text'"
is_shakespeare "$text" || die "'$text' is not tinyshakespeare (sha256 $sha256)" "the text is at $url"

if [ ! -x "$tokenize" ]; then       # make has built it; by hand it is built here
    mkdir -p "$(dirname "$tokenize")"
    "${CXX:-g++}" -std=c++17 -O3 -pthread "$root/dev/data/tokenize.cpp" -o "$tokenize"
fi
"$tokenize" -o "$out/tiny_shakespeare" --separators 0 --all 1 --val-tokens $val_tokens -- "$text"
bytes=$(wc -c < "$out/tiny_shakespeare_all.bin")
[ "$bytes" -eq $((1024 + 2 * tokens)) ] || die "$out/tiny_shakespeare_all.bin does not hold $tokens tokens"
