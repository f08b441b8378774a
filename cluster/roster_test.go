package cluster

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

// process makes a node named name on host 10.0.0.host.
func process(name string, boot uint64, host byte, state State) node {
	return node{
		identity: identity{name, boot},
		addr:     netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, host}), 7946),
		metadata: metadata{Protocol: protocol, State: state, Peer: 7947, HTTP: 8080},
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

// What becomes of a node that is joining, step by step.
func TestRosterSteps(t *testing.T) {
	self := process("a", 10, 1, Joining)
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
	refused := func(r *roster) { r.refused(refusal) }
	b := process("b", 20, 2, Active)
	for _, test := range []struct {
		name   string
		steps  []func(*roster)
		want   string
		detail string
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
			steps: []func(*roster){up(process("b", 20, 2, Joining)), tried, quiet}, want: "a.10* b.20 active"},
		{name: "heard long ago", steps: []func(*roster){up(b), down(b), tried, quiet}, want: "a.10* active",
			detail: "alone: no other member is there and no seed answers; still trying: seed:1"},
		{name: "silence after an answer", steps: []func(*roster){up(b), silence}, want: "a.10 b.20* joining",
			detail: "settle"},
		{name: "never quiet", steps: []func(*roster){up(b), tried, silence}, want: "a.10* b.20* active"},
		{
			name:  "predecessor elsewhere",
			steps: []func(*roster){up(process("a", 9, 3, Active)), tried, quiet},
			want:  "a.9* joining", detail: "name a is in use by 10.0.0.3:7946; give this node another one",
		},
		{
			name:  "predecessor elsewhere, leaving",
			steps: []func(*roster){up(process("a", 9, 3, Leaving)), tried, quiet},
			want:  "a.9 joining", detail: "in use",
		},
		{
			name:  "predecessor elsewhere, gone",
			steps: []func(*roster){up(process("a", 9, 3, Active)), up(b), tried, quiet, down(process("a", 9, 3, Active))},
			want:  "a.10* b.20* active",
		},
		{
			name:  "another that joins with a lower boot",
			steps: []func(*roster){up(process("a", 9, 3, Joining)), tried, quiet},
			want:  "a.10* active",
		},
		{
			name:  "another that joins with a higher boot",
			steps: []func(*roster){up(process("a", 11, 3, Joining)), tried, quiet},
			want:  "a.11 joining", detail: "in use",
		},
		{name: "refused", steps: []func(*roster){refused}, want: "a.10 joining", detail: "joining: refused"},
		{name: "refused, nobody else", steps: []func(*roster){found, refused, tried, quiet, silence},
			want: "a.10 joining", detail: "joining: refused"},
		{name: "refused by one that is gone", steps: []func(*roster){found, refused, tried, quiet, silence, tried},
			want: "a.10* active", detail: "alone"},
		{name: "refused, welcome to another", steps: []func(*roster){refused, up(b), tried, quiet, silence},
			want: "a.10* b.20* active"},
		{name: "a stranger comes later", steps: []func(*roster){up(b), tried, quiet, refused, silence},
			want: "a.10* b.20* active"},
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
			for _, step := range test.steps {
				step(r)
				r.advance()
			}
			v := r.view(noView())
			expect.Equal(t, summary(v), test.want)
			expect.True(t, strings.Contains(v.Detail, test.detail) && (test.detail != "" || v.Detail == ""),
				"detail %q, want %q", v.Detail, test.detail)
		})
	}
}

// Two active processes of one name, as after a split: all agree on which one counts, and the other one knows.
func TestRosterTwoActiveOfOneName(t *testing.T) {
	x, y := process("b", 50, 2, Active), process("b", 51, 3, Active)
	for _, self := range []node{x, y, process("a", 1, 1, Active)} {
		r := newRoster(self, []string{"seed:1"})
		r.up(x)
		r.up(y)
		v := r.view(noView())
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
			n := process(fmt.Sprintf("n%d", random.IntN(4)), uint64(100+i), byte(1+random.IntN(5)), Joining)
			var history []func(*roster)
			for range 1 + random.IntN(4) {
				if random.IntN(4) == 0 {
					history = append(history, func(r *roster) { r.down(n.identity) })
					continue
				}
				n := n
				n.State = states[random.IntN(3)]
				n.Policy = random.Uint32()
				history = append(history, func(r *roster) { r.up(n) })
			}
			histories = append(histories, history)
		}
		var want *View
		for range 4 {
			r := newRoster(process("self", 1, 200, Active), []string{"seed:1"})
			rest := slices.Clone(histories)
			for len(rest) > 0 {
				i := random.IntN(len(rest))
				rest[i][0](r)
				if rest[i] = rest[i][1:]; len(rest[i]) == 0 {
					rest = slices.Delete(rest, i, i+1)
				}
			}
			got := r.view(noView())
			if want == nil {
				want = got
			}
			if !slices.Equal(got.Members, want.Members) || got.Ring.Fingerprint() != want.Ring.Fingerprint() {
				t.Fatalf("round %d: another order gave another view:\n%s\n%s", round, summary(want), summary(got))
			}
		}
	}
}
