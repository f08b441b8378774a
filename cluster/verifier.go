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
//  2. If it answers, it still counts, and is asked again after doubtAgain, for doubtMost at most. If not, it is
//     forgotten (remove): when gossip takes it for alive again, it is a candidate like any other process.
//  3. If gossip takes it for alive meanwhile, believe ends the doubt.
//
// Words:
//
//	claim      what gossip says of a process and of its address
//	candidate  a claim that is asked about, or is to be asked about. It may be that of a member
//	member     a process that has answered, until gossip takes it for dead and it does not answer
//	foreign    of a candidate: it cannot be a member, such as by the settings that gossip names. A node that joins asks
//	           it all the same, to learn whether such a process exists
//	known      of an address: it is that of this process, a seed or a member
//
// Other files must keep: each claim that next returns is passed to answered, once, unless the prober ends.

// claim is what gossip says of a process and of its address. All of it is fixed for the life of a process.
type claim struct {
	identity
	addr             netip.AddrPort // of its gossip
	Peer, HTTP, GRPC uint16
}

func (n node) claim() claim { return claim{n.identity, n.addr, n.Peer, n.HTTP, n.GRPC} }

// endpoint is the address at which the process answers other nodes, by the claim.
func (c claim) endpoint() netip.AddrPort { return netip.AddrPortFrom(c.addr.Addr(), c.Peer) }

// Bounds on asking candidates.
const (
	maxProbes     = 16               // candidates asked at a time, without members in doubt
	probeBackoff  = time.Second / 10 // the pause after the first failure; each further one is twice as long
	maxBackoff    = 5 * time.Second  // the longest pause
	candidateTime = 30 * time.Second // how long a candidate is kept after gossip last named it
)

// A member that gossip takes for dead is asked before it counts as gone, because on a busy machine a process may answer
// a connection in time and gossip too late. It is gone if it does not answer for probeTimeout, or if another process
// answers. If it answers, it is asked again after doubtAgain. It counts for doubtMost at most, unless gossip takes it
// for alive by then: a process that only this process can reach is no member.
const (
	doubtAgain = time.Second / 2
	doubtMost  = 10 * time.Second
)

// The reasons for which gossip about a process is not taken in.
var (
	errUnverified = errors.New("it has not answered on its peer port yet")
	errTooMany    = errors.New("there are as many members as there may be")
	errOurAddress = errors.New("it is said to be where this process is")
)

// candidate is a process that is asked, or is to be asked, who it is.
type candidate struct {
	foreign  error     // why it cannot be a member; nil: it can
	failures int       // in a row
	err      error     // the last failure
	due      time.Time // no question before
	heard    time.Time // when gossip last named it
	doubted  time.Time // when gossip took this member for dead; zero: it does not
}

// verifier knows which processes are members, and which candidate to ask next.
type verifier struct {
	self       claim
	max        int // bounds the members, this process included
	seeds      map[netip.Addr]bool
	members    map[identity]claim // without this process
	candidates map[claim]*candidate
	asking     map[netip.AddrPort]*candidate // the questions in flight, by endpoint: one each
}

func newVerifier(self claim, limit int) *verifier {
	return &verifier{
		self: self, max: limit, seeds: map[netip.Addr]bool{}, members: map[identity]claim{},
		candidates: map[claim]*candidate{}, asking: map[netip.AddrPort]*candidate{},
	}
}

// known reports whether an address is one of this process, a seed or a member.
func (v *verifier) known(ip netip.Addr) bool {
	if ip == v.self.addr.Addr() || v.seeds[ip] {
		return true
	}
	for _, m := range v.members {
		if m.addr.Addr() == ip {
			return true
		}
	}
	return false
}

// heard takes in what gossip says of another process, and returns why the process does not count, or nil if it does.
// foreign says why it cannot be a member; nil: it can.
func (v *verifier) heard(c claim, foreign error, now time.Time) error {
	switch {
	case v.isMember(c):
		return nil
	case c.addr == v.self.addr || c.endpoint() == v.self.endpoint():
		return errOurAddress
	case foreign == nil && v.full():
		return fmt.Errorf("%w: %d; see max-members", errTooMany, v.max)
	}
	v.add(c, foreign, now)
	return errUnverified
}

// add adds a candidate, or notes that gossip has named it again. If there are too many, a random one makes room, so
// that a flood of invented candidates does not keep out others for good.
func (v *verifier) add(c claim, foreign error, now time.Time) {
	if k := v.candidates[c]; k != nil {
		k.heard, k.foreign = now, foreign
		return
	}
	if len(v.candidates) >= 4*v.max {
		for other, k := range v.candidates { // in random order
			if k.doubted.IsZero() {
				delete(v.candidates, other)
				break
			}
		}
	}
	v.candidates[c] = &candidate{foreign: foreign, due: now, heard: now}
}

// next returns the candidate to ask next, and whether it is foreign. If there is none, found is false, and wait is how
// long to wait until there may be one.
func (v *verifier) next(now time.Time) (c claim, foreign, found bool, wait time.Duration) {
	wait = candidateTime
	probes := v.probes()
	var best *candidate
	for at, k := range v.candidates {
		switch {
		case v.asking[at.endpoint()] != nil || k.doubted.IsZero() && probes >= maxProbes:
			// The candidate has to wait until a question in flight is answered. A member in doubt waits only for a
			// question to its own endpoint.
		case now.Sub(k.heard) > candidateTime:
			delete(v.candidates, at)
		case k.due.After(now):
			wait = min(wait, k.due.Sub(now))
		case best == nil || k.before(best):
			c, best = at, k
		}
	}
	if best == nil {
		return claim{}, false, false, wait
	}
	v.asking[c.endpoint()] = best
	return c, best.foreign != nil, true, 0
}

// probes counts the questions in flight without those to members in doubt.
func (v *verifier) probes() (n int) {
	for _, k := range v.asking {
		if k.doubted.IsZero() {
			n++
		}
	}
	return n
}

// before reports whether k is asked before another candidate.
func (k *candidate) before(other *candidate) bool {
	if k.doubted.IsZero() != other.doubted.IsZero() {
		return !k.doubted.IsZero()
	}
	if k.failures != other.failures {
		return k.failures < other.failures
	}
	return k.due.Before(other.due)
}

func (v *verifier) isMember(c claim) bool { return v.members[c.identity] == c }

// full reports whether there are as many members as there may be.
func (v *verifier) full() bool { return len(v.members) >= v.max-1 }

// answer is what follows from the answer to a question.
type answer struct {
	foreign  error      // not nil: the process has answered, and cannot be a member for this reason
	joins    bool       // the process counts
	gone     []identity // processes that count no more
	failures int        // of the candidate, in a row
	kept     bool       // the process counts although gossip takes it for dead
}

// answered takes in the outcome of a question to a candidate that next has returned. err says why the process that
// gossip names has not answered; nil: it has.
func (v *verifier) answered(c claim, err error, now time.Time) answer {
	k := v.asking[c.endpoint()]
	if k == nil {
		return answer{}
	}
	delete(v.asking, c.endpoint())
	if v.candidates[c] != k {
		return answer{} // the candidate was dropped, or replaced by one that is to be asked again
	}
	switch {
	case err == nil && k.doubted.IsZero():
		delete(v.candidates, c)
		if k.foreign != nil {
			return answer{foreign: k.foreign}
		}
		return v.confirm(c)
	case err == nil && now.Sub(k.doubted) < doubtMost:
		k.due, k.heard = now.Add(doubtAgain), now
		return answer{kept: true}
	case v.isMember(c):
		v.remove(c.identity)
		return answer{gone: []identity{c.identity}}
	}
	k.failures++
	k.err = err
	k.due = now.Add(min(probeBackoff<<min(k.failures-1, 10), maxBackoff))
	return answer{failures: k.failures}
}

// doubt makes next return a member at once, because gossip takes it for dead or because it has this process's name. It
// reports whether the process is a member, and so counts until it has been asked.
func (v *verifier) doubt(id identity, now time.Time) bool {
	m, is := v.members[id]
	if is {
		v.candidates[m] = &candidate{due: now, heard: now, doubted: now}
	}
	return is
}

// believe notes that gossip takes a process for alive.
func (v *verifier) believe(c claim) {
	if k := v.candidates[c]; k != nil && !k.doubted.IsZero() {
		delete(v.candidates, c)
	}
}

// confirm makes a process that has answered a member, if there are fewer than max. Another process with the same
// endpoint, or with the same name and address, is gone.
func (v *verifier) confirm(c claim) answer {
	a := answer{joins: true}
	for id, m := range v.members {
		if id != c.identity && (m.endpoint() == c.endpoint() || m.name == c.name && m.addr == c.addr) {
			v.remove(id)
			a.gone = append(a.gone, id)
		}
	}
	if _, is := v.members[c.identity]; !is && v.full() {
		return answer{gone: a.gone}
	}
	v.members[c.identity] = c
	return a
}

// remove forgets a member.
func (v *verifier) remove(id identity) {
	if m, is := v.members[id]; is {
		delete(v.members, id)
		delete(v.candidates, m)
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
