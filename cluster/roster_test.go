package cluster

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// process makes a node named name on host 10.0.0.host.
func process(name string, boot uint64, host byte, state State, generation uint32) node {
	return node{
		identity: identity{name, boot},
		addr:     netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, host}), 7946),
		metadata: metadata{protocol: protocol, state: state, generation: generation, peer: 7947, http: 8080},
	}
}

// summary is a view in one line: name.boot, with * when in the ring, and what self is.
func summary(v *View) string {
	var b strings.Builder
	for _, m := range v.Members {
		fmt.Fprintf(&b, "%s.%d", m.Name, m.Boot)
		if slices.Contains(v.Ring.Members(), m.Name) {
			b.WriteByte('*')
		}
		b.WriteByte(' ')
	}
	return b.String() + v.Self.State.String()
}

func TestRosterWithoutSeeds(t *testing.T) {
	r := newRoster(process("a", 1, 1, Joining, 0), nil)
	must.NoError(t, r.advance())
	v := r.view(nil)
	if got := summary(v); got != "a.1* active" || v.Alone || v.Detail != "" {
		t.Errorf("a node without seeds: %s, alone %v, %q", got, v.Alone, v.Detail)
	}
}

// TestRefusedAmongOthers: a node that does not want this one ends its start only as long as nobody else of the cluster
// is there.
func TestRefusedAmongOthers(t *testing.T) {
	r := newRoster(process("a", 10, 1, Joining, 0), []string{"seed:1"})
	b := process("b", 20, 2, Active, 0)
	r.up(b)
	err := r.refused(Active, errors.New("no"), true)
	expect.True(t, err == nil && r.refusal == nil, "refused although another member is there: %v, %v", err, r.refusal)
	r.down(b.identity)
	expect.True(t, r.refused(Active, errors.New("no"), true) != nil, "not refused when nobody else is there")
}

// What becomes of a node that is joining, step by step.
func TestRosterSteps(t *testing.T) {
	self := process("a", 10, 1, Joining, 0)
	up := func(n node) func(*roster) { return func(r *roster) { r.up(n) } }
	down := func(n node) func(*roster) { return func(r *roster) { r.down(n.identity) } }
	tried := (*roster).seedsTried
	found := func(r *roster) { r.found = true }
	quiet := func(r *roster) { r.quiet = true }
	silence := func(r *roster) { r.silence = true }
	refusal := errors.New("refused")
	rumoured := func(fresh int) func(*roster) {
		return func(r *roster) { r.unverified, r.fresh, r.why = 2, fresh, "c at 10.0.0.9:1: timeout" }
	}
	forgotten := func(r *roster) { r.unverified, r.fresh, r.why = 0, 0, "" }
	mistake := func(r *roster) { r.mistake = errors.New("set bind") }
	refusedBy := func(s State, verified bool) func(*roster) {
		return func(r *roster) {
			if err := r.refused(s, refusal, verified); err != nil {
				r.mistake = errors.Join(err, errors.New("at once"))
				r.silence = true
			}
		}
	}
	b := process("b", 20, 2, Active, 0)
	for _, test := range []struct {
		name   string
		steps  []func(*roster)
		want   string
		detail string
		fatal  string
	}{
		{name: "no addresses", steps: []func(*roster){tried, quiet}, want: "a.10 joining",
			detail: "none of their names stands for an address: seed:1"},
		{name: "nobody yet", steps: nil, want: "a.10 joining", detail: "joining: no seed has answered yet: seed:1"},
		{name: "seeds silent", steps: []func(*roster){found, tried, quiet}, want: "a.10 joining",
			detail: "joining: no seed has answered yet: seed:1"},
		{name: "seeds silent for long", steps: []func(*roster){found, tried, quiet, silence}, want: "a.10* active",
			detail: "alone: no other member is there and no seed answers; still trying: seed:1"},
		{name: "heard", steps: []func(*roster){up(b)}, want: "a.10 b.20* joining",
			detail: "waiting for the membership to settle"},
		{name: "heard, tried", steps: []func(*roster){up(b), tried}, want: "a.10 b.20* joining", detail: "settle"},
		{name: "heard, quiet, not all tried", steps: []func(*roster){up(b), quiet}, want: "a.10 b.20* joining",
			detail: "settle"},
		{name: "settled", steps: []func(*roster){up(b), tried, quiet}, want: "a.10* b.20* active"},
		{name: "settled with others that join",
			steps: []func(*roster){up(process("b", 20, 2, Joining, 0)), tried, quiet}, want: "a.10* b.20 active"},
		{name: "heard long ago", steps: []func(*roster){up(b), down(b), tried, quiet}, want: "a.10* active",
			detail: "alone: no other member is there and no seed answers; still trying: seed:1"},
		{name: "silence after an answer", steps: []func(*roster){up(b), silence}, want: "a.10 b.20* joining",
			detail: "settle"},
		{name: "never quiet", steps: []func(*roster){up(b), tried, silence}, want: "a.10* b.20* active"},
		{
			name:  "predecessor elsewhere",
			steps: []func(*roster){up(process("a", 9, 3, Active, 0)), tried, quiet},
			want:  "a.9* joining", detail: "name a is in use by 10.0.0.3:7946; give this node another one",
		},
		{
			name:  "predecessor elsewhere, leaving",
			steps: []func(*roster){up(process("a", 9, 3, Leaving, 0)), tried, quiet},
			want:  "a.9 joining", detail: "in use",
		},
		{
			name:  "predecessor elsewhere, gone",
			steps: []func(*roster){up(process("a", 9, 3, Active, 0)), up(b), tried, quiet, down(process("a", 9, 3, Active, 0))},
			want:  "a.10* b.20* active",
		},
		{
			name:  "predecessor here",
			steps: []func(*roster){up(process("a", 99, 1, Active, 7)), up(b), tried, quiet},
			want:  "a.10* b.20* active",
		},
		{
			name:  "another that joins with a lower boot",
			steps: []func(*roster){up(process("a", 9, 3, Joining, 0)), tried, quiet},
			want:  "a.10* active",
		},
		{
			name:  "another that joins with a higher boot",
			steps: []func(*roster){up(process("a", 11, 3, Joining, 0)), tried, quiet},
			want:  "a.11 joining", detail: "in use",
		},
		{name: "refused by one that joins", steps: []func(*roster){refusedBy(Joining, true)}, want: "a.10 joining",
			detail: "joining: refused"},
		{name: "refused by one that joins, nobody else",
			steps: []func(*roster){found, refusedBy(Joining, true), tried, quiet, silence}, want: "a.10 joining",
			detail: "joining: refused"},
		{name: "refused by one that joins, and that is gone",
			steps: []func(*roster){found, refusedBy(Joining, true), tried, quiet, silence, tried}, want: "a.10* active",
			detail: "alone"},
		{name: "refused by one that joins, welcome to another",
			steps: []func(*roster){refusedBy(Joining, true), up(b), tried, quiet, silence}, want: "a.10* b.20* active"},
		{name: "refused by an active one", steps: []func(*roster){refusedBy(Active, true)}, fatal: "at once"},
		{name: "refused by an active one, says gossip",
			steps: []func(*roster){found, refusedBy(Active, false), tried, quiet, silence}, want: "a.10 joining",
			detail: "joining: refused"},
		{name: "a stranger comes later", steps: []func(*roster){up(b), tried, quiet, refusedBy(Active, true), silence},
			want: "a.10* b.20* active"},
		{name: "a mistake of its own", steps: []func(*roster){mistake, tried}, want: "a.10 joining",
			detail: "set bind"},
		{name: "a mistake of its own, and nobody comes", steps: []func(*roster){mistake, tried, silence},
			fatal: "set bind"},
		{name: "told of others", steps: []func(*roster){found, rumoured(2), tried, quiet}, want: "a.10 joining",
			detail: "gossip tells of 2 others"},
		{name: "told of others that do not answer", steps: []func(*roster){found, rumoured(0), tried, quiet, silence},
			want: "a.10 joining", detail: "c at 10.0.0.9:1: timeout"},
		{name: "told of others, and no more",
			steps: []func(*roster){found, rumoured(0), tried, quiet, silence, forgotten}, want: "a.10* active",
			detail: "alone"},
		{name: "heard, and others are being asked", steps: []func(*roster){up(b), rumoured(1), tried, quiet},
			want: "a.10 b.20* joining", detail: "settle"},
		{name: "heard, and others do not answer", steps: []func(*roster){up(b), rumoured(0), tried, quiet},
			want: "a.10* b.20* active"},
		{name: "heard, and ever more are invented", steps: []func(*roster){up(b), rumoured(1), tried, quiet, silence},
			want: "a.10* b.20* active"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRoster(self, []string{"seed:1"})
			var err error
			for _, step := range test.steps {
				step(r)
				if err = r.advance(); err != nil {
					break
				}
			}
			if test.fatal != "" {
				must.True(t, err != nil && strings.Contains(err.Error(), test.fatal),
					"fatal error %v, want one with %q", err, test.fatal)
				return
			}
			must.NoError(t, err)
			v := r.view(nil)
			expect.Equal(t, summary(v), test.want)
			expect.True(t, strings.Contains(v.Detail, test.detail) && (test.detail != "" || v.Detail == ""),
				"detail %q, want %q", v.Detail, test.detail)
		})
	}
}

// A process that has started again where it was counts before its predecessor, for itself and for those that look on.
func TestRosterRestartInPlace(t *testing.T) {
	old := process("b", 50, 2, Active, 3)
	fresh := newRoster(process("b", 40, 2, Joining, 0), []string{"seed:1"})
	watcher := newRoster(process("a", 1, 1, Active, 0), []string{"seed:1"})
	watcher.up(old)

	watcher.up(fresh.self) // its first message: it has not heard of its predecessor
	expect.Equal(t, summary(watcher.view(nil)), "a.1* b.50* active", "before the newcomer knows of its predecessor")
	fresh.up(watcher.self)
	fresh.up(old)
	must.Equal(t, fresh.self.generation, 4, "generation")
	watcher.up(fresh.self)
	expect.Equal(t, summary(watcher.view(nil)), "a.1* b.40 active", "when it knows")
	fresh.tried, fresh.quiet = true, true
	err := fresh.advance()
	must.True(t, err == nil && fresh.self.state == Active, "the newcomer is %v, %v", fresh.self.state, err)
	watcher.up(fresh.self)
	watcher.up(old) // late news
	expect.Equal(t, summary(watcher.view(nil)), "a.1* b.40* active", "when it is active")
	watcher.down(old.identity)
	expect.Equal(t, summary(watcher.view(nil)), "a.1* b.40* active", "when gossip takes the predecessor for dead too")
}

// What gossip says of processes of our name, whether they are there or not, cannot turn the generation over.
func TestRosterGeneration(t *testing.T) {
	r := newRoster(process("a", 10, 1, Joining, 0), []string{"seed:7946"})
	for _, step := range []struct{ said, want uint32 }{{0, 1}, {7, 8}, {3, 8}, {math.MaxUint32 - 1, math.MaxUint32},
		{math.MaxUint32, math.MaxUint32}} {
		r.learn(process("a", 9, 1, Active, step.said))
		expect.True(t, r.self.generation == step.want,
			"generation %d after one of %d, want %d", r.self.generation, step.said, step.want)
	}
}

// Two active processes of one name, as after a split: all agree on which one counts, and the other one knows.
func TestRosterTwoActiveOfOneName(t *testing.T) {
	x, y := process("b", 50, 2, Active, 0), process("b", 51, 3, Active, 0)
	for _, self := range []node{x, y, process("a", 1, 1, Active, 0)} {
		r := newRoster(self, []string{"seed:1"})
		r.up(x)
		r.up(y)
		v := r.view(nil)
		m := v.Member("b")
		expect.True(t, m.Boot == 51, "%v takes boot %d for b", self, m.Boot)
		_, taken := r.conflict()
		expect.Equal(t, taken, self.boot == 50, "%v: taken", self)
		expect.Equal(t, v.Self == v.Member(self.name), self.boot != 50, "%v: Self in Members", self)
	}
}

// The order in which news of different nodes arrive does not matter.
func TestRosterOrder(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	states := []State{Joining, Active, Leaving}
	for round := range 100 {
		var histories [][]func(*roster)
		for i := range 8 {
			n := process(fmt.Sprintf("n%d", random.IntN(4)), uint64(100+i), byte(1+random.IntN(5)), Joining,
				uint32(random.IntN(3)))
			var history []func(*roster)
			for range 1 + random.IntN(4) {
				if random.IntN(4) == 0 {
					history = append(history, func(r *roster) { r.down(n.identity) })
					continue
				}
				n := n
				n.state = states[random.IntN(3)]
				n.policy = random.Uint32()
				history = append(history, func(r *roster) { r.up(n) })
			}
			histories = append(histories, history)
		}
		var want *View
		for range 4 {
			r := newRoster(process("self", 1, 200, Active, 0), []string{"seed:1"})
			rest := slices.Clone(histories)
			for len(rest) > 0 {
				i := random.IntN(len(rest))
				rest[i][0](r)
				if rest[i] = rest[i][1:]; len(rest[i]) == 0 {
					rest = slices.Delete(rest, i, i+1)
				}
			}
			got := r.view(nil)
			if want == nil {
				want = got
			}
			if !slices.Equal(got.Members, want.Members) || got.Ring.Fingerprint() != want.Ring.Fingerprint() {
				t.Fatalf("round %d: another order gave another view:\n%s\n%s", round, summary(want), summary(got))
			}
		}
	}
}
