package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// claimed makes a claim of a process named name on host 10.0.0.host.
func claimed(name string, boot uint64, host byte) claim {
	return process(name, boot, host, Active).claim()
}

// yes and no are the answers of processes that are, and are not, the ones that gossip names.
func yes(claim) error { return nil }
func no(claim) error  { return errors.New("timeout") }

// asks has the verifier ask all that it would ask now, each of which answers as said by who.
func (v *verifier) asks(now time.Time, who func(claim) error) (asked []string) {
	var all []claim
	for {
		c, _, found, _ := v.next(now)
		if !found {
			break
		}
		all = append(all, c)
		asked = append(asked, c.String())
	}
	for _, c := range all {
		v.answered(c, who(c), now)
	}
	return asked
}

func TestVerifier(t *testing.T) {
	start := time.Unix(1000, 0)
	v := newVerifier(claimed("a", 1, 1), 4)
	b, c := claimed("b", 2, 2), claimed("c", 3, 3)
	expect.ErrorIs(t, v.heard(b, nil, start), errUnverified, "heard of for the first time")
	at, foreign, found, _ := v.next(start)
	must.True(t, found && !foreign && at == b, "asks %v, %v, %v", at, foreign, found)
	_, _, found, _ = v.next(start)
	expect.True(t, !found, "asks a second time meanwhile")
	a := v.answered(b, nil, start)
	expect.True(t, a.joins && v.heard(b, nil, start) == nil && v.known(b.addr.Addr()), "after its answer: %+v", a)
	other := b
	other.HTTP++
	expect.ErrorIs(t, v.heard(other, nil, start), errUnverified, "on another port")

	// It is gone, and asked like any other one when it is back.
	now := start
	v.asks(now, no)
	v.remove(b.identity)
	expect.True(t, !v.known(b.addr.Addr()), "the address of one that is gone is known")
	expect.ErrorIs(t, v.heard(b, nil, now), errUnverified, "when it is back")
	delete(v.candidates, other) // which is asked at the same endpoint, one at a time
	v.asks(now, yes)
	expect.True(t, v.isMember(b), "does not count although it answers again")
	v.doubt(b.identity, now)
	expect.True(t, slices.Equal(v.asks(now, no), []string{b.String()}) && !v.isMember(b),
		"counts although it does not answer any more")
	v.heard(b, nil, now)
	v.asks(now, yes)

	// A process at the same place takes it.
	next := claimed("b", 9, 2)
	next.Peer++
	v.heard(next, nil, now)
	at, _, _, _ = v.next(now)
	a = v.answered(at, nil, now)
	expect.True(t, slices.Equal(a.gone, []identity{b.identity}), "the successor is confirmed: %+v", a)

	// No more than there may be.
	v.heard(c, nil, now)
	v.asks(now, yes)
	v.heard(claimed("d", 4, 4), nil, now)
	v.asks(now, yes)
	expect.ErrorIs(t, v.heard(claimed("e", 5, 5), nil, now), errTooMany, "one too many")
	v.remove(c.identity)
	expect.ErrorIs(t, v.heard(claimed("e", 5, 5), nil, now), errUnverified, "when another one is gone")
	v.asks(now, yes)
	expect.ErrorIs(t, v.heard(c, nil, now), errTooMany, "one that is back when another one has its place")
	moved := c
	moved.Peer++
	expect.True(t, !v.confirm(moved).joins, "one that is back at another endpoint joins in place of no one")

	for _, bad := range []struct {
		c    claim
		want error
	}{
		{claimed("x", 1, 1), errOurAddress},
		{claim{identity: identity{"x", 1}, addr: netip.AddrPortFrom(v.self.addr.Addr(), 1), Peer: v.self.Peer},
			errOurAddress},
	} {
		expect.ErrorIs(t, v.heard(bad.c, nil, now), bad.want, "%+v", bad.c)
	}
}

// TestVerifierSuccessors: whoever answers where another one was has taken its place, and a member that answers on other
// ports than before stays one although there is no room for more.
func TestVerifierSuccessors(t *testing.T) {
	now := time.Unix(1000, 0)
	v, b := newVerifier(claimed("a", 1, 1), 3), claimed("b", 2, 2)
	v.heard(b, nil, now)
	v.asks(now, yes)
	next := claimed("next", 3, 2)
	next.addr = netip.AddrPortFrom(b.addr.Addr(), b.addr.Port()+1)
	v.heard(next, nil, now)
	v.asks(now, yes)
	expect.True(t, !v.isMember(b) && v.isMember(next), "two are at one endpoint")
	moved := next
	moved.HTTP++
	v.heard(moved, nil, now)
	c, _, found, _ := v.next(now)
	must.True(t, found && c == moved, "is not asked")
	last := claimed("last", 4, 4)
	v.heard(last, nil, now)
	v.asks(now, yes)
	if a := v.answered(moved, nil, now); !v.isMember(last) || !a.joins || !v.isMember(moved) {
		t.Errorf("on another port, among as many as there may be: %+v", a)
	}
}

// TestProberDown: a member that says that it leaves is gone with the gossip, any other one is asked first; and who
// answers is compared with what gossip says.
func TestProberDown(t *testing.T) {
	a := process("a", 1, 1, Active)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c := &Cluster{cfg: Config{MaxMembers: 4}, self: a, wake: fifo.NewSignal(), ctx: ctx}
	for state, stays := range map[State]bool{Active: true, Joining: true, Leaving: false} {
		p, b := newProber(c), process("b", 2, 2, state)
		p.v.heard(b.claim(), nil, p.now())
		p.v.asks(p.now(), yes)
		p.up(b)
		p.down(b.identity)
		expect.Equal(t, p.v.isMember(b.claim()), stays, "%v: counts %v", state, !stays)
	}
	p, b := newProber(c), process("b", 2, 2, Active)
	says := Identity{Name: "b", Boot: 2, GossipPort: b.addr.Port(), HTTPPort: b.HTTP, GRPCPort: b.GRPC,
		Settings: a.Settings, Voters: a.Voters}
	for what, change := range map[string]func(*Identity){
		"": func(*Identity) {}, "name": func(id *Identity) { id.Name = "c" }, "boot": func(id *Identity) { id.Boot++ },
		"gossip": func(id *Identity) { id.GossipPort++ }, "http": func(id *Identity) { id.HTTPPort++ },
		"grpc":     func(id *Identity) { id.GRPCPort++ },
		"settings": func(id *Identity) { id.Settings++ }, "voters": func(id *Identity) { id.Voters++ },
	} {
		id := says
		change(&id)
		err := p.compare(b.claim(), id, false)
		expect.Equal(t, err == nil, what == "", "another %s: %v", what, err)
	}
}

// TestVerifierDoubt: a member that gossip takes for dead counts as long as it answers, and for doubtMost at most.
func TestVerifierDoubt(t *testing.T) {
	for _, test := range []struct {
		name    string
		answers func(after time.Duration) error
		heard   time.Duration // by the gossip again; 0: never
		gone    time.Duration // negative: never
	}{
		{"answers, and is heard", func(time.Duration) error { return nil }, 3 * time.Second, -1},
		{"answers, and is never heard", func(time.Duration) error { return nil }, 0, doubtMost},
		{"is dead", func(time.Duration) error { return no(claim{}) }, 0, 0},
		{"answers, and dies", func(after time.Duration) error {
			if after < 2*time.Second {
				return nil
			}
			return no(claim{})
		}, 0, 2 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			start := time.Unix(1000, 0)
			v := newVerifier(claimed("a", 1, 1), 4)
			b := claimed("b", 2, 2)
			v.heard(b, nil, start)
			v.asks(start, yes)
			must.True(t, v.doubt(b.identity, start), "is not asked before it counts as gone")
			gone := time.Duration(-1)
			for after := time.Duration(0); after <= 2*doubtMost && gone < 0; after += doubtAgain / 2 {
				if test.heard != 0 && after == test.heard {
					v.believe(b)
				}
				asked := v.asks(start.Add(after), func(claim) error { return test.answers(after) })
				must.True(t, len(asked) == 0 || test.heard == 0 || after < test.heard,
					"asked %v after it was heard again", after)
				if !v.isMember(b) {
					gone = after
				}
			}
			expect.Equal(t, gone, test.gone, "gone after")
		})
	}

	// All that are in doubt are asked at once.
	start := time.Unix(1000, 0)
	v := newVerifier(claimed("a", 1, 1), 100)
	var all []claim
	for i := range byte(3 * maxProbes) {
		all = append(all, claimed(fmt.Sprint("n", i), uint64(i)+2, i+2))
		v.heard(all[i], nil, start)
		v.asks(start, yes)
	}
	for _, c := range all {
		v.doubt(c.identity, start)
	}
	asked := v.asks(start, yes)
	expect.True(t, len(asked) == len(all), "%d of %d members in doubt are asked", len(asked), len(all))
}

// TestVerifierForeign: whoever cannot be a member is asked only to find out whether it is there.
func TestVerifierForeign(t *testing.T) {
	now := time.Unix(1000, 0)
	v := newVerifier(claimed("a", 1, 1), 4)
	why := errors.New("another secret")
	v.heard(claimed("x", 7, 7), why, now)
	all, _, _ := v.pending()
	expect.Equal(t, all, 0, "it is waited for")
	c, foreign, _, _ := v.next(now)
	a := v.answered(c, nil, now)
	expect.True(t, foreign && a.foreign == why && !a.joins && !v.isMember(c), "foreign %v, %+v", foreign, a)
}

// The time between two questions doubles, and who is not heard of any more is forgotten.
func TestVerifierBackoff(t *testing.T) {
	now := time.Unix(1000, 0)
	v := newVerifier(claimed("a", 1, 1), 4)
	b := claimed("b", 2, 2)
	var waits []time.Duration
	for range 8 {
		v.heard(b, nil, now)
		asked := v.asks(now, no)
		must.Equal(t, len(asked), 1, "after %v: asked %v", waits, asked)
		_, _, found, wait := v.next(now)
		must.True(t, !found, "asks again at once")
		waits = append(waits, wait/time.Millisecond)
		now = now.Add(wait)
	}
	expect.Equal(t, fmt.Sprint(waits), "[100ns 200ns 400ns 800ns 1.6µs 3.2µs 5µs 5µs]", "waits in ms (shown as ns)")
	if all, fresh, detail := v.pending(); all != 1 || fresh != 0 || detail != "b at 10.0.0.2:7947: timeout" {
		t.Errorf("pending: %d, %d, %q", all, fresh, detail)
	}
	v.next(now.Add(candidateTime + time.Second))
	all, _, _ := v.pending()
	expect.Equal(t, all, 0, "one that was not heard of for long is not forgotten")
}

// A flood of invented processes takes no more room than there is, and does not keep out others for ever.
func TestVerifierFlood(t *testing.T) {
	now := time.Unix(1000, 0)
	v := newVerifier(claimed("a", 1, 1), 64)
	invent := func(i int) {
		v.heard(claim{identity{fmt.Sprint("x", i), 5},
			netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 7946), 7947, 0, 0}, nil, now)
	}
	for i := range 10_000 {
		invent(i)
	}
	n := len(v.candidates)
	expect.True(t, n <= 4*64, "%d candidates", n)
	asked := v.asks(now, no)
	expect.True(t, len(asked) == maxProbes, "asks %d at a time", len(asked))
	// One that is there is in the end asked, too, when it goes on telling of itself.
	late := claimed("late", 6, 66)
	for round := 0; !v.isMember(late); round++ {
		must.True(t, round != 10_000, "never asked")
		for i := range 100 {
			invent(10_000*(round+2) + i)
		}
		v.heard(late, nil, now)
		v.asks(now, func(c claim) error {
			if c == late {
				return nil
			}
			return no(c)
		})
		now = now.Add(probeBackoff)
	}
}
