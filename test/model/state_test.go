package model

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"unsafe"
)

const (
	maxNodes    = 3
	maxVoters   = 3
	maxMessages = 10
	maxEpochs   = 4
	maxTerms    = 8 // in an epoch
)

// term is a term of the protocol: the epoch in the upper half, the number within it in the lower.
type term uint8

func newTerm(epoch, n uint8) term { return term(epoch<<4 | n) }

func (t term) epoch() uint8   { return uint8(t) >> 4 }
func (t term) String() string { return fmt.Sprintf("%d.%d", t>>4, t&15) }

// proc is a process: node index and boot. Zero is nobody.
type proc uint8

func newProc(node int, boot uint8) proc { return proc(1 + node + maxNodes*int(boot)) }

func (p proc) node() int   { return int(p-1) % maxNodes }
func (p proc) boot() uint8 { return uint8(int(p-1) / maxNodes) }

func (p proc) String() string {
	if p == 0 {
		return "nobody"
	}
	return string(rune('A'+p.node())) + strings.Repeat("'", int(p.boot()))
}

// content is what a node has counted: in bits 0 to 2 the admissions by name, in bit 3 whether every key started full,
// in bits 4 to 7 how many units were charged without a name.
type content uint8

const full content = 8

func (c content) ids() uint8   { return uint8(c) & 7 }
func (c content) charge() int  { return int(c >> 4) }
func (c content) marks() uint8 { return uint8(c) &^ 7 }
func (c content) isFull() bool { return c&full != 0 }
func (c content) lacks(ids uint8) bool {
	return !c.isFull() && bits.OnesCount8(ids&^c.ids()) > c.charge()
}

func (c content) String() string {
	var b strings.Builder
	b.WriteByte('{')
	for i := range 3 {
		if c>>i&1 == 1 {
			fmt.Fprintf(&b, "a%d ", i)
		}
	}
	if c.isFull() {
		b.WriteString("full ")
	}
	if c.charge() > 0 {
		fmt.Fprintf(&b, "+%d ", c.charge())
	}
	return strings.TrimRight(b.String(), " ") + "}"
}

// keyIDs are the admissions of key k. There are two keys, so that a whole copy takes two messages.
func keyIDs(k uint8) uint8 {
	if k == 0 {
		return 2
	}
	return 1 | 4
}

// Standings of a node.
const (
	none   = 0
	owned  = 1
	frozen = 2
)

// How a node came by its content.
const (
	nothing      = 0 // there is none
	itself       = 1 // held it at origin's term, its strict rules under a grant
	copied       = 2 // as the follower of origin
	released     = 3 // from origin, by a commit
	releasedHole = 4 // from origin, by a commit, but origin never had a grant
)

// origin names a holder at a term.
type origin struct {
	term term
	from proc
}

// Phases of a follower, as its holder sees them.
const (
	detached  = 0
	begun     = 1 // the first message of a whole copy is in flight
	beginning = 2 // and confirmed
	complete  = 3 // the last message of the whole copy is in flight
	current   = 4 // everything sent is confirmed
	sending   = 5 // a change is in flight
)

type follower struct {
	to        proc
	phase     uint8
	seq       uint8
	sent      content
	confirmed content
	escrow    uint8 // confirmed units that may be spent ahead of the copy
}

// record is what a voter has recorded.
type record struct {
	term   term
	node   proc
	backup proc
}

// What is known of the record that a grant replaced.
const (
	prevUnknown = 0
	prevNothing = 1
	prevRecord  = 2
)

type support struct {
	age       uint8 // 1 + ticks since the request was sent; 0: none
	late      bool  // the reply is in flight
	gen       uint8
	free      bool // recorded without a backup
	prevState uint8
	prev      record
}

type node struct {
	boot       uint8
	standing   uint8
	term       term
	known      term
	ready      bool // under the present term it has had a grant, and its content is whole for strict rules
	content    content
	origin     origin
	how        uint8
	escrow     uint8 // of a copy: units the holder may have spent beyond it
	stream     origin
	seq        uint8
	staging    bool
	staged     content
	guard      proc  // the backup that requests name
	gen        uint8 // rises with each change of it
	target     proc  // of a commit in progress
	follow     [maxNodes]follower
	support    [maxVoters]support
	everGrants uint8 // voters that have granted the present term at any time
}

type voter struct {
	reading    bool
	abstain    uint8
	floor      uint8 // epoch
	rec        record
	gen        uint8
	left       uint8 // ticks that the record has to live
	prevState  uint8
	prev       record
	read       uint8
	sawReading uint8
}

// Kinds of messages.
const (
	request   = 1
	replicate = 2
	ack       = 3
	commit    = 4
	commitAck = 5
)

type message struct {
	kind     uint8
	from, to proc
	term     term
	seq      uint8  // or the generation of a request
	age      uint8  // of a request: ticks since it was sent
	backup   proc   // of a request
	release  origin // of a request
	step     uint8  // of a replicate: begun, complete or sending
	keys     uint8
	content  content
	escrow   uint8
	known    term // of a commit; of its answer the new term
	whole    bool // of a commit
}

// question is one check on its way through a forwarder.
type question struct {
	stage uint8 // 0 none, 1 asked, 2 answered, 3 the answer is with the forwarder, 4 used
	asked uint8 // ticks since it was sent
	left  uint8 // lease that the answer says was left
	real  uint8 // lease that is left
	bound uint8 // ticks that the forwarder thinks it may use the answer
}

// state is everything there is. All of it is bytes and bools: see raw.
type state struct {
	nodes    [maxNodes]node
	voters   [maxVoters]voter
	net      [maxMessages]message
	messages uint8
	next     uint8 // admissions decided
	given    uint8 // those whose answers were given, or that a borrower has made
	lent     uint8 // those that are for a borrower to make
	borrowed uint8 // and that it may make now
	clock    uint8 // the highest epoch begun
	question question
	used     [maxEpochs * maxTerms]proc // who was granted a term
	bad      uint8                      // a step broke a promise

	claims, moves, crashes, restarts, gens, attaches uint8 // done so far
}

// raw returns the memory of *p, which must hold nothing but bytes and bools: these leave no gaps.
func raw[T any](p *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(p)), unsafe.Sizeof(*p))
}

// pack appends the bytes of s to dst, with runs of zeros shortened.
func (s *state) pack(dst []byte) []byte {
	b := raw(s)
	for i := 0; i < len(b); {
		if b[i] != 0 {
			dst = append(dst, b[i])
			i++
			continue
		}
		from := i
		for i < len(b) && i < from+240 && b[i] == 0 {
			if i+8 <= len(b) && binary.NativeEndian.Uint64(b[i:]) == 0 {
				i += 8
			} else {
				i++
			}
		}
		dst = append(dst, 0, byte(i-from))
	}
	return dst
}

func unpack(data []byte) (s state) {
	b := raw(&s)
	for i := 0; len(data) > 0; {
		if data[0] != 0 {
			b[i] = data[0]
			i, data = i+1, data[1:]
			continue
		}
		i, data = i+int(data[1]), data[2:]
	}
	return s
}

// canonical drops messages that cannot matter any more and sorts the rest, which has no order.
func (m *model) canonical(s *state) {
	kept := s.net[:0]
	for _, msg := range s.net[:s.messages] {
		if !m.dead(s, &msg) {
			kept = append(kept, msg)
		}
	}
	for i := len(kept); i < int(s.messages); i++ {
		s.net[i] = message{}
	}
	s.messages = uint8(len(kept))
	slices.SortFunc(kept, compareMessages)
}

// sortVoters brings the voters, which differ by nothing but what they hold, into an order. Where two of them differ
// only in whom they have read, states that are the same may count twice; that costs time and nothing else.
func (m *model) sortVoters(s *state) {
	for i := 1; i < m.Voters; i++ {
		for j := i; j > 0 && s.compareVoters(j-1, j) > 0; j-- {
			s.swapVoters(j-1, j)
		}
	}
}

func compareMessages(a, b message) int { return bytes.Compare(raw(&a), raw(&b)) }

// column is everything that belongs to one voter.
type column struct {
	voter   voter
	support [maxNodes]support
	marks   [maxNodes]uint8
}

func (s *state) column(v int) (c column) {
	c.voter = s.voters[v]
	c.voter.read, c.voter.sawReading = uint8(bits.OnesCount8(c.voter.read)), uint8(bits.OnesCount8(c.voter.sawReading))
	for n := range s.nodes {
		nd := &s.nodes[n]
		c.support[n], c.marks[n] = nd.support[v], nd.everGrants>>v&1
	}
	return c
}

// answer gives the answers to admissions; to what was lent the answer is that the borrower may make it.
func (s *state) answer(ids uint8) {
	s.borrowed |= ids & s.lent &^ s.given
	s.given |= ids &^ s.lent
}

// carried is what arrives of a content.
func (m *model) carried(s *state, c content) content {
	if m.has(loansTravel) {
		return c
	}
	return c &^ content(s.lent)
}

func (s *state) compareVoters(i, j int) int {
	a, b := s.column(i), s.column(j)
	return bytes.Compare(raw(&a), raw(&b))
}

func (s *state) swapVoters(i, j int) {
	s.voters[i], s.voters[j] = s.voters[j], s.voters[i]
	for v := range s.voters {
		s.voters[v].read = swapBits(s.voters[v].read, i, j)
		s.voters[v].sawReading = swapBits(s.voters[v].sawReading, i, j)
	}
	for n := range s.nodes {
		nd := &s.nodes[n]
		nd.support[i], nd.support[j] = nd.support[j], nd.support[i]
		nd.everGrants = swapBits(nd.everGrants, i, j)
	}
}

func swapBits(b uint8, i, j int) uint8 {
	if (b>>i^b>>j)&1 == 1 {
		b ^= 1<<i | 1<<j
	}
	return b
}
