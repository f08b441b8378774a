package cluster

import (
	"errors"
	"fmt"
	"net/netip"
	"time"
)

// This file decides which processes count as members. Gossip proves nothing: a host that can write gossip can name any
// process at any address. So a process counts only after it has answered on its peer port that it is the one that
// gossip names. The verifier has no goroutine, clock or network; prober.go runs it.
//
// The path of a process that gossip names:
//
//  1. heard makes it a candidate. Until it has answered, gossip about it is not taken in (errUnverified).
//  2. next returns the candidate to ask next. The prober asks it.
//  3. answered takes the answer in. If the process is the one that gossip names, confirm makes it a member. Otherwise
//     it is asked again after a pause.
//
// The path of a member that gossip takes for dead:
//
//  1. doubt makes it a candidate that is asked before all others. It still counts.
//  2. If it answers (decideDoubt), it still counts, and is asked again after doubtAgain, for doubtMost at most. If not,
//     it counts no more (down). If another process answers, it is forgotten (remove).
//  3. If gossip takes it for alive meanwhile, believe ends the doubt.
//
// Words:
//
//	claim      what gossip says of a process and of its address
//	candidate  a claim that is asked about, or is to be asked about. It may be that of a member
//	member     a process that has answered. It is live until gossip takes it for dead and it does not answer
//	foreign    of a candidate: it cannot be a member, such as by the settings that gossip names. A node that joins asks
//	           it all the same, to learn whether such a process exists
//	known      of an address: it is that of this process, a seed or a live member
//	preferred  of a candidate: it was at a known address, and one of few there, so it is asked before others
//
// Other files must keep: each claim that next returns is passed to answered, once, unless the prober ends.

// claim is what gossip says of a process and of its address. All of it is fixed for the life of a process.
type claim struct {
	identity
	addr             netip.AddrPort // of its gossip
	peer, http, grpc uint16
}

func (n node) claim() claim { return claim{n.identity, n.addr, n.peer, n.http, n.grpc} }

// endpoint is the address at which the process answers other nodes, by the claim.
func (c claim) endpoint() netip.AddrPort { return netip.AddrPortFrom(c.addr.Addr(), c.peer) }

// Bounds on asking candidates.
const (
	maxProbes      = 16               // candidates asked at a time, without members in doubt
	maxOtherProbes = maxProbes / 2    // of these, candidates that are not preferred
	maxPreferred   = 8                // preferred candidates at one address, because gossip can name any number there
	probeBackoff   = time.Second / 10 // the pause after the first failure; each further one is twice as long
	maxBackoff     = 5 * time.Second  // the longest pause
	maxFailures    = 3                // after so many failures in a row, a member that is asked again counts no more
	candidateTime  = 30 * time.Second // how long a candidate is kept after gossip last named it
)

// A member that gossip takes for dead is asked before it counts as gone, because on a busy machine a process may answer
// a connection in time and gossip too late. It is gone if it does not answer for doubtTimeout, or if another process
// answers. If it answers, it is asked again after doubtAgain. It counts for doubtMost at most, unless gossip takes it
// for alive by then: a process that only this process can reach is no member.
const (
	doubtTimeout = time.Second
	doubtAgain   = time.Second / 2
	doubtMost    = 10 * time.Second
)

// The reasons for which gossip about a process is not taken in.
var (
	errUnverified = errors.New("it has not answered on its peer port yet")
	errNoPeerPort = errors.New("it has no peer port")
	errTooMany    = errors.New("there are as many members as there may be")
	errOurAddress = errors.New("it is said to be where this process is")
)

// outcome is the outcome of a question to a candidate.
type outcome uint8

const (
	confirmed outcome = iota + 1 // the process that gossip names has answered
	mistaken                     // another process has answered, or the process with other ports or settings
	silent                       // no process has answered, or none that can prove to be a node
)

// candidate is a process that is asked, or is to be asked, who it is.
type candidate struct {
	foreign   error // why it cannot be a member; nil: it can
	preferred bool
	asked     bool      // the question is in flight
	counted   bool      // the question in flight is one of verifier.probes
	failures  int       // in a row
	err       error     // the last failure
	due       time.Time // no question before
	heard     time.Time // when gossip last named it
	doubted   time.Time // when gossip took this member for dead; zero: it does not
	kept      bool      // it has answered since doubted
}

// verified is a member: a process that has answered. down makes it not live, but remembers it for some time.
type verified struct {
	claim
	live bool
	gone uint64 // verifier.deaths when it was last not live any more
}

// verifier knows which processes are members, and which candidate to ask next.
type verifier struct {
	self       claim
	max        int    // bounds the live members, this process included
	live       int    // live members, without this process
	deaths     uint64 // how many times a member has ceased to be live
	seeds      map[netip.Addr]bool
	hosts      map[netip.Addr]int // the number of live members at each address
	members    map[identity]*verified
	candidates map[claim]*candidate
	asking     map[netip.AddrPort]*candidate // the questions in flight, by endpoint: one each
	probes     int                           // questions in flight, without those to members in doubt
	others     int                           // of probes, those to candidates that are not preferred
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

// heard takes in what gossip says of another process, and returns why the process does not count, or nil if it does. A
// member that is not live becomes live at once, and is asked again.
func (v *verifier) heard(c claim, now time.Time) error {
	if m := v.members[c.identity]; m != nil && m.claim == c && v.fits(m) {
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
	case !v.fits(nil):
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

// add adds a candidate, or notes that gossip has named it again.
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

// evict drops a random candidate that is not preferred, so that a flood of invented candidates does not keep out later
// ones for good. It reports whether there was one.
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

// ask makes next return a member at once, although it has answered.
func (v *verifier) ask(id identity, now time.Time) {
	if m := v.members[id]; m != nil {
		v.candidates[m.claim] = &candidate{preferred: true, due: now, heard: now}
	}
}

// next returns the candidate to ask next, and whether it is foreign. If there is none, found is false, and wait is how
// long to wait until there may be one.
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
			// The candidate has to wait until a question in flight is answered. A member in doubt waits only for a
			// question to its own endpoint.
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

// timeout is how long the prober waits for the answer of a candidate that next has returned.
func (v *verifier) timeout(c claim) time.Duration {
	if k := v.candidates[c]; k != nil && !k.doubted.IsZero() {
		return doubtTimeout
	}
	return probeTimeout
}

// before reports whether k is asked before another candidate.
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
	foreign  error      // not nil: the process has answered, and cannot be a member for this reason
	joins    bool       // the process counts
	gone     []identity // processes that count no more
	failures int        // of the candidate, in a row
	kept     bool       // the process counts although gossip takes it for dead
	first    bool       // with kept: this is its first answer since then
}

// answered takes in the outcome of a question to a candidate that next has returned.
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
		return answer{} // the candidate was dropped, or replaced by one that is to be asked again
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

// doubt notes that gossip takes a process for dead. It reports whether the process counts until it has been asked. It
// does if it is a live member.
func (v *verifier) doubt(id identity, now time.Time) bool {
	m := v.members[id]
	if m == nil || !m.live {
		return false
	}
	if k := v.candidates[m.claim]; k != nil && k.asked {
		k.doubted = now // the answer to the question in flight decides
		return true
	}
	v.candidates[m.claim] = &candidate{preferred: true, due: now, heard: now, doubted: now}
	return true
}

// believe notes that gossip takes a process for alive.
func (v *verifier) believe(c claim) {
	if k := v.candidates[c]; k != nil && !k.doubted.IsZero() {
		delete(v.candidates, c)
	}
}

// decideDoubt takes in the outcome of a question to a member in doubt.
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

// confirm makes a process that has answered a live member, if there are fewer than max. Another process with the same
// endpoint, or with the same name and address, is gone.
func (v *verifier) confirm(c claim) answer {
	a := answer{joins: true}
	for id, m := range v.members {
		if id != c.identity && (m.endpoint() == c.endpoint() || m.name == c.name && m.addr == c.addr) {
			v.remove(id)
			a.gone = append(a.gone, id)
		}
	}
	if !v.isMember(c) {
		if !v.fits(v.members[c.identity]) {
			return answer{gone: a.gone}
		}
		v.remove(c.identity)
		m := &verified{claim: c}
		v.members[c.identity] = m
		v.setLive(m, true)
	}
	return a
}

// fits reports whether a process may be live: it is already, or fewer than max are. m is nil if it is no member.
func (v *verifier) fits(m *verified) bool { return m != nil && m.live || v.live < v.max-1 }

// down makes a member not live. The verifier remembers that it has answered, so that it counts at once if gossip takes
// it for alive again. If more than max are remembered so, down forgets the one that has not been live for longest.
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

// remove forgets a member.
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

// pending counts the candidates that may become members (all), and those of them that no question has failed for
// (fresh). detail says of one of them why its last question failed; it is empty if none has.
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
