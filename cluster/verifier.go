package cluster

import (
	"errors"
	"fmt"
	"net/netip"
	"time"
)

// claim is what gossip says of a process and of where it is to be reached. All of it is fixed for the life of a
// process.
type claim struct {
	identity
	addr             netip.AddrPort // of its gossip
	peer, http, grpc uint16
}

func (n node) claim() claim { return claim{n.identity, n.addr, n.peer, n.http, n.grpc} }

// endpoint is where the process answers other nodes, if it is there.
func (c claim) endpoint() netip.AddrPort { return netip.AddrPortFrom(c.addr.Addr(), c.peer) }

// Bounds on asking those that gossip names.
const (
	maxProbes      = 16               // processes asked at a time
	maxOtherProbes = maxProbes / 2    // of them, those that are not preferred
	maxPreferred   = 8                // candidates at one known address that are: gossip can name any number there
	probeBackoff   = time.Second / 10 // after the first failure; it doubles
	maxBackoff     = 5 * time.Second
	maxFailures    = 3                // in a row, after which a member that has been taken for dead counts no more
	candidateTime  = 30 * time.Second // that a candidate is kept without having been heard of
)

// A member that gossip takes for dead is asked before it counts as gone: a busy machine lets a process answer a
// connection, and its gossip too late. It is gone when it does not answer for doubtTimeout, or answers with a mistake.
// One that answers is asked again after doubtAgain, and counts for doubtMost at most unless gossip hears it by then:
// what only this process can reach is no member.
const (
	doubtTimeout = time.Second
	doubtAgain   = time.Second / 2
	doubtMost    = 10 * time.Second
)

// Why gossip about a process is not taken in.
var (
	errUnverified = errors.New("it has not answered on its peer port yet")
	errNoPeerPort = errors.New("it has no peer port")
	errTooMany    = errors.New("there are as many members as there may be")
	errOurAddress = errors.New("it is said to be where this process is")
)

// outcome is what asking a process has led to.
type outcome uint8

const (
	confirmed outcome = iota + 1 // it is who gossip says
	mistaken                     // another process answers there
	silent                       // no process answers there, or none that can prove to be a node
)

// candidate is a process that is to be asked who it is.
type candidate struct {
	foreign   error // why it cannot be a member even if it is there; nil: it can
	preferred bool  // at an address that is known
	asked     bool  // the question is in flight
	counted   bool  // and is one of the bounded number of them
	failures  int   // in a row
	err       error // the last of them
	due       time.Time
	heard     time.Time
	doubted   time.Time // since when gossip takes this member for dead; zero: it does not
	kept      bool      // it has answered since
}

// verified is a process that has answered.
type verified struct {
	claim
	live bool // to the gossip
	gone uint64
}

// verifier knows which of the processes that gossip names have answered on their peer ports, and whom to ask next: a
// plain state without goroutine, clock or network. Gossip proves nothing: a host that can write it can name any process
// at any address.
type verifier struct {
	self       claim
	max        int // members, this process included
	live       int // verified and live
	deaths     uint64
	seeds      map[netip.Addr]bool
	hosts      map[netip.Addr]int // of live members
	members    map[identity]*verified
	candidates map[claim]*candidate
	asking     map[netip.AddrPort]*candidate // by endpoint
	probes     int                           // in flight, without those of members in doubt
	others     int                           // of them, not preferred
}

func newVerifier(self claim, limit int) *verifier {
	return &verifier{
		self: self, max: limit, seeds: map[netip.Addr]bool{}, hosts: map[netip.Addr]int{},
		members:    map[identity]*verified{},
		candidates: map[claim]*candidate{}, asking: map[netip.AddrPort]*candidate{},
	}
}

// known reports whether an address is one of this process, a seed or a live member.
func (v *verifier) known(ip netip.Addr) bool {
	return ip == v.self.addr.Addr() || v.seeds[ip] || v.hosts[ip] > 0
}

// heard takes in what gossip says of another process, and returns why it does not count, or nil when it does. One that
// has answered before and was taken for dead counts at once, and is asked again.
func (v *verifier) heard(c claim, now time.Time) error {
	if m := v.members[c.identity]; m != nil && m.claim == c {
		if !m.live {
			v.setLive(m, true)
			v.candidates[c] = &candidate{preferred: true, due: now, heard: now}
		}
		return nil
	}
	switch {
	case c.peer == 0:
		return errNoPeerPort
	case c.addr == v.self.addr || c.endpoint() == v.self.endpoint():
		return errOurAddress
	case v.live >= v.max-1:
		return fmt.Errorf("%w: %d; see max-members", errTooMany, v.max)
	}
	v.add(c, nil, now)
	return errUnverified
}

// heardForeign takes in what gossip says of a process that cannot be a member.
func (v *verifier) heardForeign(c claim, why error, now time.Time) {
	if c.peer != 0 && c.addr != v.self.addr && c.endpoint() != v.self.endpoint() {
		v.add(c, why, now)
	}
}

func (v *verifier) add(c claim, foreign error, now time.Time) {
	if k := v.candidates[c]; k != nil {
		k.heard, k.foreign = now, foreign
		return
	}
	if len(v.candidates) >= 4*v.max && !v.evict() {
		return
	}
	preferred := v.known(c.addr.Addr()) && v.candidatesAt(c.addr.Addr()) < maxPreferred
	v.candidates[c] = &candidate{foreign: foreign, preferred: preferred, due: now, heard: now}
}

// evict makes room for another candidate: any that is not preferred goes, so that a flood of invented ones does not
// keep out later ones for good.
func (v *verifier) evict() bool {
	for c, k := range v.candidates { // in random order
		if !k.asked && !k.preferred {
			delete(v.candidates, c)
			return true
		}
	}
	return false
}

func (v *verifier) candidatesAt(ip netip.Addr) (n int) {
	for c := range v.candidates {
		if c.addr.Addr() == ip {
			n++
		}
	}
	return n
}

// ask has a member asked anew, at once.
func (v *verifier) ask(id identity, now time.Time) {
	if m := v.members[id]; m != nil {
		v.candidates[m.claim] = &candidate{preferred: true, due: now, heard: now}
	}
}

// next returns the process to ask next, and whether it is one that cannot be a member; or how long to wait before there
// may be one.
func (v *verifier) next(now time.Time) (c claim, foreign, found bool, wait time.Duration) {
	wait = candidateTime
	var best *candidate
	for at, k := range v.candidates {
		switch {
		case k.asked:
		case now.Sub(k.heard) > candidateTime && !v.isMember(at):
			delete(v.candidates, at)
		case v.asking[at.endpoint()] != nil ||
			k.doubted.IsZero() && (v.probes >= maxProbes || !k.preferred && v.others >= maxOtherProbes):
			// One that ends makes room. Members in doubt are all asked at once.
		case k.due.After(now):
			wait = min(wait, k.due.Sub(now))
		case best == nil || k.before(best):
			c, best = at, k
		}
	}
	if best == nil {
		return claim{}, false, false, wait
	}
	best.asked, best.counted = true, best.doubted.IsZero()
	v.asking[c.endpoint()] = best
	if best.counted {
		v.probes++
		if !best.preferred {
			v.others++
		}
	}
	return c, best.foreign != nil, true, 0
}

// timeout is how long the answer to a question that next gave out is waited for.
func (v *verifier) timeout(c claim) time.Duration {
	if k := v.candidates[c]; k != nil && !k.doubted.IsZero() {
		return doubtTimeout
	}
	return probeTimeout
}

// before says which of two candidates is asked first.
func (k *candidate) before(other *candidate) bool {
	if k.doubted.IsZero() != other.doubted.IsZero() {
		return !k.doubted.IsZero()
	}
	if k.preferred != other.preferred {
		return k.preferred
	}
	if k.failures != other.failures {
		return k.failures < other.failures
	}
	return k.due.Before(other.due)
}

func (v *verifier) isMember(c claim) bool {
	m := v.members[c.identity]
	return m != nil && m.claim == c
}

// answer is what follows from the answer to a question.
type answer struct {
	foreign  error      // the process is there, and cannot be a member
	joins    bool       // the process counts from now on, or still does
	gone     []identity // processes that count no more
	failures int        // of the candidate, in a row
	kept     bool       // the process counts although gossip takes it for dead
	first    bool       // and has answered for the first time since gossip does
}

// answered takes in what came of a question that next gave out.
func (v *verifier) answered(c claim, what outcome, err error, now time.Time) (a answer) {
	k := v.asking[c.endpoint()]
	if k == nil {
		return answer{}
	}
	k.asked = false
	delete(v.asking, c.endpoint())
	if k.counted {
		v.probes--
		if !k.preferred {
			v.others--
		}
	}
	if v.candidates[c] != k {
		return answer{} // it has been given up, or is to be asked anew
	}
	if !k.doubted.IsZero() {
		return v.decideDoubt(c, k, what, now)
	}
	if what == confirmed {
		delete(v.candidates, c)
		if k.foreign != nil {
			return answer{foreign: k.foreign}
		}
		return v.confirm(c)
	}
	k.failures++
	k.err = err
	k.due = now.Add(min(probeBackoff<<min(k.failures-1, 10), maxBackoff))
	a.failures = k.failures
	if v.isMember(c) && (what == mistaken || k.failures >= maxFailures) {
		v.remove(c.identity)
		a.gone = []identity{c.identity}
		k.heard = now
	}
	return a
}

// doubt notes that gossip takes a process for dead. It reports whether the process counts until it has been asked.
func (v *verifier) doubt(id identity, now time.Time) bool {
	m := v.members[id]
	if m == nil || !m.live {
		return false
	}
	if k := v.candidates[m.claim]; k != nil && k.asked {
		k.doubted = now // by what it answers to the question that is in flight
		return true
	}
	v.candidates[m.claim] = &candidate{preferred: true, due: now, heard: now, doubted: now}
	return true
}

// believe notes that a process is alive to the gossip.
func (v *verifier) believe(c claim) {
	if k := v.candidates[c]; k != nil && !k.doubted.IsZero() {
		delete(v.candidates, c)
	}
}

// decideDoubt takes in what a member has answered that gossip takes for dead.
func (v *verifier) decideDoubt(c claim, k *candidate, what outcome, now time.Time) answer {
	if what == confirmed && now.Sub(k.doubted) < doubtMost {
		first := !k.kept
		k.due, k.heard, k.kept = now.Add(doubtAgain), now, true
		return answer{kept: true, first: first}
	}
	if what == mistaken {
		v.remove(c.identity)
		delete(v.candidates, c)
	} else {
		v.down(c.identity)
	}
	return answer{gone: []identity{c.identity}}
}

// confirm counts a process that has answered. Another process that was at its place before is gone.
func (v *verifier) confirm(c claim) answer {
	a := answer{joins: true}
	for id, m := range v.members {
		if id != c.identity && (m.endpoint() == c.endpoint() || m.name == c.name && m.addr == c.addr) {
			v.remove(id)
			a.gone = append(a.gone, id)
		}
	}
	if !v.isMember(c) {
		if v.members[c.identity] == nil && v.live >= v.max-1 {
			return answer{gone: a.gone}
		}
		v.remove(c.identity)
		m := &verified{claim: c}
		v.members[c.identity] = m
		v.setLive(m, true)
	}
	return a
}

// down notes that gossip takes a process for dead. That it has answered is remembered for a while: it may be back.
func (v *verifier) down(id identity) {
	m := v.members[id]
	if m == nil || !m.live {
		return
	}
	v.setLive(m, false)
	v.deaths++
	m.gone = v.deaths
	delete(v.candidates, m.claim)
	if len(v.members)-v.live <= v.max {
		return
	}
	oldest := id
	for other, o := range v.members {
		if !o.live && o.gone < v.members[oldest].gone {
			oldest = other
		}
	}
	v.remove(oldest)
}

func (v *verifier) remove(id identity) {
	if m := v.members[id]; m != nil {
		v.setLive(m, false)
		delete(v.members, id)
	}
}

func (v *verifier) setLive(m *verified, live bool) {
	if m.live == live {
		return
	}
	m.live = live
	host := m.addr.Addr()
	if live {
		v.live++
		v.hosts[host]++
		return
	}
	v.live--
	if v.hosts[host]--; v.hosts[host] == 0 {
		delete(v.hosts, host)
	}
}

// pending counts the candidates that gossip names, and those of them that have not been asked to the end even once; and
// says of one why it does not count yet.
func (v *verifier) pending() (all, fresh int, detail string) {
	for c, k := range v.candidates {
		if k.foreign != nil || v.isMember(c) {
			continue
		}
		all++
		if k.failures == 0 {
			fresh++
		} else if text := fmt.Sprintf("%s at %s: %v", c.name, c.endpoint(), k.err); detail == "" || text < detail {
			detail = text
		}
	}
	return all, fresh, detail
}
