"""The words that the interpreter gives a program are those that bash gives it."""

# Snippets are lines of scripts.
# ruff: noqa: E501
from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from dynmo_train.cli.run_script.interpreter import interpret_script
from dynmo_train.cli.run_script.syntax import ScriptError
from tests.tables import table

# In bash, the program prints its words; here, it becomes a command of ours.
PROLOGUE = "dynmo-prep() { printf '%s\\1' \"$@\"; printf '\\2'; }\n"
SNIPPETS = {
    "plain": "dynmo-prep a b  c\tdd",
    "continued": "dynmo-prep a \\\n  b \\\n\\\n c",
    "continued at the end": "dynmo-prep a \\",
    "continued in word": "dynmo-prep ab\\\ncd",
    "comments": "# one\ndynmo-prep a # two\ndynmo-prep 'a # b' a#b #c",
    "quotes": """dynmo-prep "a b" 'c "d"' "e 'f'" g'h i'"j k"l '' "" """,
    "escapes": r"""dynmo-prep a\ b \"c \$X "\$Y \\ \" \n" 'a\b' \\""",
    "split": "X='a  b c'; dynmo-prep $X \"$X\" p$X's' \"p$X\"s",
    "split at the ends": "X=' a b '; dynmo-prep x$X'y' $X \"$X\"",
    "split empty": 'X=\'\'; dynmo-prep a $X b "$X" $X$X ""$X',
    "split lines": "X='a\nb\n\nc'; dynmo-prep $X \"$X\"",
    "unset": "dynmo-prep a$NOPE$NOPE b $NOPE",
    "default": 'A=1; E=; dynmo-prep ${A:-x} ${B:-x y} "${B:-x y}" ${E:-e} ${E-e}z ${B-"p q"} ${B:-${A}2}',
    "default assigns": ': "${A:=5}"; : ${B=6 7}; dynmo-prep $A $B "$B"',
    "alternative": 'A=1; E=; dynmo-prep ${A:+yes} ${B:+no} x${E:+no}y ${E+set} "${B:+no}"',
    "substrings": "A=checkpoints/gpt.tar.gz; dynmo-prep ${A%.*} ${A%%.*} ${A#*/} ${A##*.} ${A%.zip} ${A#c*p}",
    "replace": 'A=a-b-c; S=-; dynmo-prep ${A/-/_} ${A//-/_} ${A//"$S"} ${A/#a/x} ${A/%c/x} ${A/q/x}',
    "patterns in quotes": 'A=a/b.c/d.e; B=--lr=2; X=b; dynmo-prep "${A##*/}" "${A%/*}" "${A%%.*}" "${B#*=}" "${A#*"$X"}" "${A/b/*}" "${A//./-}" "${A##*[/]}"',
    "quoted patterns": """A="a b*c"; dynmo-prep "${A#*" "}" "${A/ /_}" "${A%"*"*}" "${A#'a '}" "${B:-*}" "${A/b/"x y"}" "${A/\\*/+}" """,
    "words without separators": 'IFS= read -r X <<< "a b"; dynmo-prep "$X"',
    "length": "A=hello; B=(1 22 333); dynmo-prep ${#A} ${#B[@]} ${#B[2]} $#",
    "slices": "A=hello; dynmo-prep ${A:1} ${A:1:3} ${A: -2} ${A:0:-1}",
    "case of letters": "A=Hello; dynmo-prep ${A,,} ${A^^} ${A^} ${A,}",
    "arrays": 'A=(a "b c" d); dynmo-prep ${A[@]} "${A[@]}" ${A[1]} "${A[1]}" "${A[*]}" $A p"${A[@]}"s',
    "array of lines": "A=(\n  --x 1 # one\n  # two\n  --y 'a b'\n)\ndynmo-prep \"${A[@]}\"",
    "array appended": 'A=(a); A+=(b "c d"); A+=(); B=(x "${A[@]}" y); dynmo-prep "${B[@]}" ${#A[@]}',
    "array empty": 'A=(); dynmo-prep a "${A[@]}" b ${A[@]}',
    "array elements": 'A=(a b); A[1]=z; A[2]=y; i=2; dynmo-prep "${A[@]}" ${A[i]} ${A[$i]} ${A[i-1]} ${A[-1]}',
    "array of options": 'A=("--lr 1" "--split \'9,1\'"); dynmo-prep ${A[@]}',
    "string appended": "A=a; A+=b; A+=' c'; dynmo-prep $A \"$A\"",
    "arguments": 'dynmo-prep $1 "$2" $3 "$@" $# "$*" ${2:-x} ${9:-nine}',
    "arguments shifted": 'shift; dynmo-prep "$@"; shift 2; dynmo-prep "$@" $#; set -- p "q r"; dynmo-prep "$@"',
    "arithmetic": "A=3; dynmo-prep $((A*2+1)) $(($A % 2)) $((7/2)) $((-7/2)) $((2**10)) $((A>2&&A<5)) $((A==3?8:9))",
    "arithmetic more": "dynmo-prep $((1+2*3-4)) $(( (1+2)*3 )) $((0x1F)) $((1<<4|3)) $((~5)) $((!0)) $((10%3)) $((-2**2))",
    "arithmetic assigns": "A=1; ((A+=5)); let B=A*2; : $((C=7)); ((A++)); dynmo-prep $A $B $C $((++A)) $((A--)) $A",
    "arithmetic of variables": "GPUS=8; NODES=4; N=$(($GPUS*$NODES)); dynmo-prep $N $((N/GPUS)) $((UNSET+1))",
    "if": 'if [ "$1" = a ]; then dynmo-prep yes; else dynmo-prep no; fi\nif [ -z "$X" ]; then dynmo-prep empty; fi',
    "elif": "X=2\nif [ $X -eq 1 ]; then dynmo-prep 1\nelif [ $X -eq 2 ]\nthen\ndynmo-prep 2\nelse dynmo-prep 3; fi",
    "nested if": "if true; then if false; then dynmo-prep a; else dynmo-prep b; fi; dynmo-prep c; fi",
    "tests": "for t in 1 2; do [ $t -gt 1 -o x = y ] && dynmo-prep gt $t; [ ! $t = 1 -a -n a ] && dynmo-prep ne $t; done",
    "double brackets": 'X=llama2; [[ $X == llama* && -n $X ]] && dynmo-prep a; [[ $X != "llama*" || 1 -gt 2 ]] && dynmo-prep b',
    "double brackets more": "[[ ( a == b || a == a ) && ! -e /nope ]] && dynmo-prep a; [[ 12 =~ ^[1-9][0-9]*$ ]] && dynmo-prep n",
    "and or": "true && dynmo-prep a || dynmo-prep b; false && dynmo-prep c || dynmo-prep d; false || false || dynmo-prep e",
    "negated": "! false && dynmo-prep a; if ! [ a = b ]; then dynmo-prep b; fi",
    "status": "false; dynmo-prep $?; true; dynmo-prep $?",
    "case": 'case "$1" in x|a) dynmo-prep first ;; *) dynmo-prep other ;; esac\ncase b.c in *.d) ;; [a-b].?) dynmo-prep m;; esac',
    "case of sizes": 'S=8B\ncase "${S}" in\n "800M")\n  L=24\n ;;\n "8B")\n  L=32\n  H=4096\n ;;\nesac\ndynmo-prep $L $H',
    "for": "for x in a 'b c' $NOPE d; do dynmo-prep $x; done\nfor y; do dynmo-prep \"$y\"; done",
    "for of numbers": "for i in {1..3}; do dynmo-prep $i; done; for i in $(seq 2 4); do dynmo-prep $i; done",
    "for of numbers in C": "for ((i=0; i<3; i++)); do dynmo-prep $i; done",
    "while": "i=0; while [ $i -lt 3 ]; do i=$((i+1)); [ $i = 2 ] && continue; dynmo-prep $i; done",
    "while over arguments": 'while [[ $# -gt 0 ]]; do case $1 in a) shift; A=$1;; *) B="$B,$1";; esac; shift; done\ndynmo-prep $A $B',
    "break": "for i in 1 2; do for j in 1 2; do dynmo-prep $i $j; break 2; done; done; dynmo-prep end",
    "functions": 'f() { dynmo-prep f "$@"; return 3; }\nf a "b c"; dynmo-prep $? "$1"\nfunction g { local x=1; dynmo-prep $x; }\ng',
    "groups": "{ dynmo-prep a; X=1; }; ( X=2; dynmo-prep $X ); dynmo-prep $X",
    "substitution": 'dynmo-prep $(echo a b) "$(echo a  b)" `echo c` $(dirname /x/y/z) $(basename /x/y.sh .sh) "$(echo "$(echo in)")"',
    "substitution of a folder": 'D=$(cd / && pwd); dynmo-prep $D; dynmo-prep "$(printf "%03d-%s" 7 x)"',
    "pipes": "dynmo-prep $(echo 'a b c' | wc -w) $(echo 'h1 h2' | awk '{print $2}') $(printf 'x\\ny\\n' | head -n 1) $(echo aB | tr A-Z a-z)",
    "eval": 'X="dynmo-prep $1 \'p q\'"; eval $X; eval "Y=5"; dynmo-prep $Y',
    "here-string": 'read -ra A <<< "a b  c"; dynmo-prep "${A[@]}" ${#A[@]}; read P Q <<< "1 2 3"; dynmo-prep $P "$Q"',
    "here-document": "X=1\ndynmo-prep $(cat <<EOF\na $X \\$X\nEOF\n) $(cat <<'EOF'\n$X\nEOF\n)",
    "export": 'export A=1 B="2 3"; declare -a C=(x "y z"); readonly D=4; dynmo-prep $A "$B" "${C[@]}" $D',
    "semicolons": "A=1;B=2;dynmo-prep $A;dynmo-prep $B",
    "exit": "dynmo-prep a; exit 0; dynmo-prep b",
    "set e": "set -e; dynmo-prep a; if false; then :; fi; false || true; dynmo-prep b",
    "patterns that match nothing": "dynmo-prep [0]*3+[1]*58 a*zzz ?nope",
    "braces": "dynmo-prep {path} a{b} {} '{1..2}'",
    "equals": "dynmo-prep --a=b A=1 --c='d e'",
    "dollar": "dynmo-prep a$ $ 'b$' \"c$\" $1$2",
    "nested quotes": 'dynmo-prep "${1:-"x y"}" "$(dirname "/a b/c")"',
    "line ends of Windows": "A=(\r\n --x 1\r\n --y\r\n)\r\ndynmo-prep a \\\r\n b\r\n",
    "tilde": "HOME=/h; dynmo-prep a~ '~' \"~/x\"",
    "condition in a list": 'X=; [ -n "$X" ] || X=5; [ -n "$X" ] && dynmo-prep $X',
    "until": "i=0; until [ $i -ge 2 ]; do ((i++)); dynmo-prep $i; done",
    "local variables": "N=4; f() { local N=8; M=9; dynmo-prep $N; }; f; dynmo-prep $N $M",
    "local values of arguments": "LR=3; f() { local LR=${LR:-1} size=$1; LR=$LR$size; dynmo-prep $LR; }; f a; dynmo-prep $LR x$size",
    "local without a value": "N=4; f() { local N i; dynmo-prep x$N; for i in 1 2; do N=5; done; }; i=7; f; dynmo-prep $N $i",
    "local arrays": "A=(1 2); f() { local -a A=(3); declare B=(4); A+=(5); dynmo-prep ${A[@]} ${B[@]}; }; f; dynmo-prep ${A[@]} x${B[@]}",
    "local appended": "A=(1); f() { local A+=(2); dynmo-prep ${A[@]}; }; f; dynmo-prep ${A[@]}",
    "local in nested calls": "f() { local a=1; g; dynmo-prep $a; }; g() { a=2; dynmo-prep $a; }; f; dynmo-prep x$a",
    "local in recursion": "f() { local n=$1; if [ $n -gt 0 ]; then f $((n-1)); fi; dynmo-prep $n; }; f 2",
    "global in a function": "f() { declare -g a=1; export b=2; }; a=0; f; dynmo-prep $a $b",
    "status of declarations": "set -e; f() { local x=$(false); dynmo-prep in; }; f; export Y=$(false); dynmo-prep out",
    "variables of one call": "f() { dynmo-prep ${N:-x} $M; }; M=1; N=8 M=2 f; f; dynmo-prep ${N:-u} $M",
    "slices of arrays": 'n=1; A=(1 2 3 4); dynmo-prep ${A[@]:1:2} "${A[@]: -3:2}" "${A[*]:1:3}" ${A[@]:9} ${A[@]:$n} ${A[@]:0:n}',
    "slices of arguments": 'dynmo-prep "${@:2}" ${@:1:1} "${@: -1}"; f() { dynmo-prep f "${@:2}"; }; f 1 2 "3 4"',
    "braces expand": 'X=q; dynmo-prep a{1,{2,3}}b {"$X",r} "{a,b}" {a,} x{,y} {a,b}{1,2} {1..$X} {a..e} {09..11} {1..9..4} --x={1,2}',
    "braces that do not expand": "dynmo-prep {a,b {a} a,b} }{ '{1,2}' \\{a,b}; A={1,2}; dynmo-prep $A",
    "braces of arrays": "A=(/d/{en,de}_text_document); dynmo-prep ${A[@]} ${#A[@]}; for i in {1..$NOPE} x{a,b}; do dynmo-prep $i; done",
    "arithmetic that is not evaluated": "i=0; N=0; (( 0 && i++ )); (( 1 || ++i )); dynmo-prep $((N ? 8/N : 1)) $((1 ? 2 : (i=5))) $((N && 8/N)) $i",
    "texts with escapes": 'dynmo-prep "$(echo -e "a\\nb\\tc")" "$(echo "a\\nb")" "$(printf "%s-%s " 1 2 3 4)" "$(printf "x\\ty\\n")"',
    "function removed": "f() { dynmo-prep f; }; f=3; unset -f f; dynmo-prep $f; unset f; dynmo-prep ${f:-none}",
}
ARGUMENTS = ["a", "b c", "--d"]


def by_bash(text, tmp_path):
    script = tmp_path / "script.sh"
    # bash itself does not read line ends of Windows.
    script.write_text(PROLOGUE + text.replace("\r\n", "\n"))
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", str(script), *ARGUMENTS],
        capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin:/bin"}, cwd=tmp_path, check=False,
    )  # fmt: skip
    return [line.split("\1")[:-1] for line in done.stdout.split("\2")[:-1]]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@table("name", SNIPPETS)
def test_words_are_those_of_bash(name, tmp_path):
    result = interpret_script(SNIPPETS[name], str(tmp_path / "script.sh"), ARGUMENTS, {"PATH": "/usr/bin"}, tmp_path)
    assert [list(step.words[1:]) for step in result.steps] == by_bash(SNIPPETS[name], tmp_path)
    assert result.steps


@table(
    ("text", "message"),
    [
        ("declare -A H; dynmo-prep ${H[b]}", "declare -A is not interpreted"),
        ("H=([small]=1 [big]=2); dynmo-prep ${H[big]}", "subscripts within the array H"),
        ("f() { local -n r=X; dynmo-prep $r; }; f", "local -n is not interpreted"),
        ("declare -i N=2*3; dynmo-prep $N", "declare -i is not interpreted"),
        ("A=(1 2); unset 'A[0]'; dynmo-prep ${A[@]}", "single elements are not removed"),
        ("printf -v N '%02d' 3; dynmo-prep $N", "printf has no format, or an option"),
        ("dynmo-prep $(printf '%.2f' 1.5)", "more than %s and %d"),
        ("IFS=, read -ra A <<< a,b; dynmo-prep ${A[@]}", "IFS before read is not interpreted"),
        ("A=hello; dynmo-prep ${A^^[he]}", "^^ with a pattern is not interpreted"),
        ("dynmo-prep $[1+2]", "write $((EXPRESSION))"),
        ("dynmo-prep {1..99999}", "more than 20,000 words"),
        ("dynmo-prep {1..999}{1..999}", "more than 20,000 words"),
        ("dynmo-prep " + "{a,b}" * 200, "nested too deep|more than"),
        ("dynmo-prep " + "{a,b}" * 12 + "{" * 4000, "more than 2,097,152 steps"),
        ("dynmo-prep " + "{" * 100_000, "more than 2,097,152 steps"),
    ],
)
def test_syntax_with_another_meaning_is_refused(text, message, tmp_path):
    with pytest.raises(ScriptError, match="|".join(map(re.escape, message.split("|")))):
        interpret_script(text, str(tmp_path / "script.sh"), ARGUMENTS, {"PATH": "/usr/bin"}, tmp_path)


def test_exec_of_a_program_ends_the_script(tmp_path):
    result = interpret_script("exec dynmo-prep a\ndynmo-prep b", "script.sh", [], {}, tmp_path)
    assert [step.words for step in result.steps] == [("dynmo-prep", "a")]
