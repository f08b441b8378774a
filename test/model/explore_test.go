package model

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"strings"
)

const chunkSize = 1 << 20

// explorer visits every state that can be reached, nearest first. Two states count as one if 64 bits of their hash are
// the same; among a million that happens by chance once in thirty million runs, and every run hashes differently.
type explorer struct {
	*model
	chunks  [][]byte // states, packed
	refs    []uint32 // by number of a state: where its bytes begin
	parents []uint32
	hashes  []uint64 // those that are known, open addressing, 0 where there is none
	seed    maphash.Seed
	buf     []byte
}

// result is what an exploration came to.
type result struct {
	states    int
	depth     int
	exhausted bool
	broken    string // what was broken, empty if nothing
	trace     []string
	seen      map[[2]string]bool // what happened, in words
}

func (m *model) explore(limit int) (r result) {
	e := &explorer{model: m, hashes: make([]uint64, 1<<16), seed: maphash.MakeSeed()}
	r.seen = make(map[[2]string]bool)
	first := m.initial()
	m.canonical(&first)
	m.sortVoters(&first)
	e.add(&first, 0)
	levelEnd := 1
	for at := 0; at < len(e.refs); at++ {
		if at == levelEnd {
			r.depth++
			levelEnd = len(e.refs)
		}
		s := unpack(e.bytes(uint32(at)))
		m.successors(&s, func(a action, next *state) {
			if r.broken != "" {
				return
			}
			m.sortVoters(next)
			if e.add(next, uint32(at)) {
				r.seen[[2]string{a.what, a.variant}] = true
				if r.broken = m.check(next); r.broken != "" {
					r.trace = e.trace(uint32(len(e.refs) - 1))
				}
			}
		})
		if r.states = len(e.refs); r.broken != "" || r.states > limit {
			return r
		}
	}
	r.exhausted = true
	return r
}

func (e *explorer) bytes(number uint32) []byte {
	ref := e.refs[number]
	chunk := e.chunks[ref/chunkSize]
	at := ref % chunkSize
	size := uint32(chunk[at]) | uint32(chunk[at+1])<<8
	return chunk[at+2 : at+2+size]
}

// add reports whether s is new.
func (e *explorer) add(s *state, parent uint32) bool {
	if len(e.refs)*2 > len(e.hashes) {
		old := e.hashes
		e.hashes = make([]uint64, 2*len(old))
		for _, hash := range old {
			if hash != 0 {
				e.note(hash)
			}
		}
	}
	if !e.note(max(maphash.Bytes(e.seed, raw(s)), 1)) {
		return false
	}
	e.buf = s.pack(e.buf[:0])
	size := len(e.buf) + 2
	last := len(e.chunks) - 1
	if last < 0 || len(e.chunks[last])+size > chunkSize {
		e.chunks = append(e.chunks, make([]byte, 0, chunkSize))
		last++
	}
	e.refs = append(e.refs, uint32(last*chunkSize+len(e.chunks[last])))
	e.chunks[last] = append(e.chunks[last], byte(len(e.buf)), byte(len(e.buf)>>8))
	e.chunks[last] = append(e.chunks[last], e.buf...)
	e.parents = append(e.parents, parent)
	return true
}

// note reports whether hash is new.
func (e *explorer) note(hash uint64) bool {
	mask := uint64(len(e.hashes) - 1)
	i := hash & mask
	for ; e.hashes[i] != 0; i = (i + 1) & mask {
		if e.hashes[i] == hash {
			return false
		}
	}
	e.hashes[i] = hash
	return true
}

// trace tells how a state is reached. The states are kept with their voters sorted; the trace replays the steps
// without sorting, so that a voter keeps its number.
func (e *explorer) trace(number uint32) (lines []string) {
	var path []uint32
	for ; number != 0; number = e.parents[number] {
		path = append(path, number)
	}
	s := e.initial()
	e.canonical(&s)
	for i := len(path) - 1; i >= 0; i-- {
		want := e.bytes(path[i])
		var next state
		var how string
		var buf []byte
		e.successors(&s, func(a action, to *state) {
			if how != "" {
				return
			}
			sorted := *to
			e.sortVoters(&sorted)
			if buf = sorted.pack(buf[:0]); bytes.Equal(buf, want) {
				next, how = *to, a.in(e.model, &s)
			}
		})
		if how == "" {
			return append(lines, "the trace cannot be replayed: voters were sorted differently")
		}
		lines = append(lines, fmt.Sprintf("%3d. %s", len(path)-i, how))
		s = next
	}
	return lines
}

func (r result) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d states, %d steps deep", r.states, r.depth)
	switch {
	case r.broken != "":
		fmt.Fprintf(&b, ": %s\n%s", r.broken, strings.Join(r.trace, "\n"))
	case r.exhausted:
		b.WriteString(", all of them explored: nothing is broken")
	default:
		b.WriteString(": not all were explored")
	}
	return b.String()
}

// in tells of the action as something that happens in s.
func (a action) in(model *model, s *state) string {
	name := func(n int) string { return model.proc(s, n).String() }
	m := a.msg
	switch a.what {
	case "tick":
		return "a tick passes"
	case "request":
		what := fmt.Sprintf("%v sends a request for %v, backup %v (word %d)", m.from, m.term, m.backup, m.seq)
		if m.release != (origin{}) {
			what += fmt.Sprintf(", with proof that %v gave up %v", m.release.from, m.release.term)
		}
		return what + a.variant
	case "vote":
		return fmt.Sprintf("voter %d receives %v's request for %v, backup %v (word %d), sent %d ticks ago%s", a.a+1,
			m.from, m.term, m.backup, m.seq, m.age, a.variant)
	case "reply":
		return fmt.Sprintf("the late reply of voter %d reaches %s", a.b+1, name(a.a))
	case "settle":
		return fmt.Sprintf("%s has a grant%s", name(a.a), a.variant)
	case "decide":
		return fmt.Sprintf("%s admits a%d%s", name(a.a), a.b, a.variant)
	case "lend":
		return fmt.Sprintf("%s lends a%d", name(a.a), a.b)
	case "hand":
		return fmt.Sprintf("%s lets the borrower have a%d", name(a.a), a.b)
	case "spend":
		return fmt.Sprintf("the borrower admits a%d", a.b)
	case "end":
		return fmt.Sprintf("%s takes a%d, whose loan has ended, for free", name(a.a), a.b)
	case "give":
		return fmt.Sprintf("%s acknowledges a%d", name(a.a), a.b)
	case "claim":
		return fmt.Sprintf("%s claims term %v%s", name(a.a), a.term, a.variant)
	case "crash":
		return name(a.a) + " crashes and restarts"
	case "copy":
		return fmt.Sprintf("%s brings %s's copy to %v at %v%s", name(a.a), name(a.b), m.content, m.term, a.variant)
	case "replicate":
		return fmt.Sprintf("%v sends %v message %d at %v: %s", m.from, m.to, m.seq, m.term, m.contents())
	case "apply":
		return fmt.Sprintf("%v applies message %d of %v at %v: %s", m.to, m.seq, m.from, m.term, m.contents())
	case "ackEarly":
		return fmt.Sprintf("%v confirms message %d of %v without having applied it", m.to, m.seq, m.from)
	case "ack":
		return fmt.Sprintf("%v has %v's confirmation of message %d", m.to, m.from, m.seq)
	case "guard":
		return fmt.Sprintf("%s lets answers wait for %s and will have it recorded as the backup", name(a.a), name(a.b))
	case "unguard":
		return fmt.Sprintf("%s gives its backup up and will have that recorded", name(a.a))
	case "commit":
		return fmt.Sprintf("%s freezes and sends %s the commit of %v with %v", name(a.a), name(a.b), m.term, m.content)
	case "takeOver":
		return fmt.Sprintf("%v has %v's commit of %v and takes over at %v with %v", m.to, m.from, m.term, a.term,
			m.content)
	case "released":
		return fmt.Sprintf("%v has the answer to its commit and is released", m.to)
	case "voterRestart":
		return fmt.Sprintf("voter %d restarts", a.a+1)
	case "read":
		return fmt.Sprintf("voter %d reads voter %d's records%s", a.a+1, a.b+1, a.variant)
	case "epoch":
		return fmt.Sprintf("voter %d finds no majority to read from and begins epoch %d", a.a+1, a.b)
	case "ask":
		return "a forwarder sends a question"
	case "answer":
		return name(a.a) + " answers it"
	case "answered":
		return "the forwarder has the answer"
	case "useAnswer":
		return "the forwarder uses the answer"
	}
	return a.what
}

func (m *message) contents() string {
	steps := map[uint8]string{begun: "begins a whole copy", complete: "completes the copy", sending: "changes"}
	return fmt.Sprintf("%s, keys %02b of %v", steps[m.step], m.keys, m.content)
}
