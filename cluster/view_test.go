package cluster

import (
	"testing"

	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func TestView(t *testing.T) {
	self := Member{Name: "a", Boot: 1, State: Active}
	v := newView(nil, self, []Member{
		{Name: "c", Boot: 3, State: Active},
		{Name: "b", Boot: 2, State: Joining},
		self,
		{Name: "d", Boot: 4, State: Leaving},
	})
	must.True(t, len(v.Members) == 4 && v.Self == &v.Members[0] && v.Self.Name == "a",
		"members %+v, self %+v", v.Members, v.Self)
	table := ring.Build([]string{"a", "c"})
	if v.Ring.Fingerprint() != table.Fingerprint() {
		t.Errorf("the ring holds %q, want the active ones", v.Ring.Members())
	}
	for p := range ring.Partitions {
		got, want := v.Owner(p).Name, table.Members()[table.Owner(p)]
		must.Equal(t, got, want, "owner of %d", p)
	}
	m := v.Member("d")
	expect.True(t, m != nil && m.Boot == 4, "Member(d): %+v", m)
	expect.Equal(t, v.Member("dd"), nil, "Member(dd)")
	n := testing.AllocsPerRun(100, func() { v.Owner(17) })
	expect.True(t, n == 0, "Owner allocates %v times", n)
	again := newView(v.Ring, self, []Member{{Name: "c", Boot: 3, State: Active}, self})
	expect.Equal(t, again.Ring, v.Ring, "the ring was made anew for the same members")
	if other := newView(v.Ring, self, []Member{{Name: "d", Boot: 4, State: Active},
		self}); other.Ring.Fingerprint() != ring.Build([]string{"a", "d"}).Fingerprint() {
		t.Errorf("the ring holds %q after as many others have taken their place", other.Ring.Members())
	}
	self.State = Joining
	expect.Equal(t, newView(nil, self, []Member{self}).Owner(0), nil, "owner in a cluster where nobody is active")
}

func TestViewTakesOverTheRing(t *testing.T) {
	r := newRoster(process("a", 1, 1, Active), []string{"seed:1"})
	r.up(process("b", 2, 2, Active))
	first := r.view(noView())
	n := process("b", 2, 2, Active)
	n.Policy = 7
	r.up(n)
	r.up(process("c", 3, 3, Joining))
	second := r.view(first)
	expect.Equal(t, second.Ring, first.Ring, "the ring was built anew although the active members are the same")
	expect.True(t, second.Version == first.Version+1 && second.Member("b").PolicyHash == 7, "second view: %+v", second)
	m := second.Member("b")
	expect.True(t, m.Host == "10.0.0.2" && m.GossipAddr == "10.0.0.2:7946" && m.PeerAddr == "10.0.0.2:7947" &&
		m.HTTPAddr == "10.0.0.2:8080" && m.GRPCAddr == "", "addresses: %+v", m)
}
