package cluster

import (
	"testing"

	"github.com/weirlimit/weir/ring"
)

func TestView(t *testing.T) {
	self := Member{Name: "a", Boot: 1, State: Active}
	v := newView(nil, self, []Member{
		{Name: "c", Boot: 3, State: Active},
		{Name: "b", Boot: 2, State: Joining},
		self,
		{Name: "d", Boot: 4, State: Leaving},
	})
	if len(v.Members) != 4 || v.Self != &v.Members[0] || v.Self.Name != "a" {
		t.Fatalf("members %+v, self %+v", v.Members, v.Self)
	}
	table := ring.Build([]string{"a", "c"})
	if v.Ring.Fingerprint() != table.Fingerprint() {
		t.Errorf("the ring holds %q, want the active ones", v.Ring.Members())
	}
	for p := range ring.Partitions {
		if got, want := v.Owner(p).Name, table.Members()[table.Owner(p)]; got != want {
			t.Fatalf("owner of %d: %s, want %s", p, got, want)
		}
	}
	if m := v.Member("d"); m == nil || m.Boot != 4 {
		t.Errorf("Member(d): %+v", m)
	}
	if m := v.Member("dd"); m != nil {
		t.Errorf("Member(dd): %+v", m)
	}
	if n := testing.AllocsPerRun(100, func() { v.Owner(17) }); n != 0 {
		t.Errorf("Owner allocates %v times", n)
	}
	again := newView(v.Ring, self, []Member{{Name: "c", Boot: 3, State: Active}, self})
	if again.Ring != v.Ring {
		t.Error("the ring was made anew for the same members")
	}
	if other := newView(v.Ring, self, []Member{{Name: "d", Boot: 4, State: Active}, self}); other.Ring.Fingerprint() != ring.Build([]string{"a", "d"}).Fingerprint() {
		t.Errorf("the ring holds %q after as many others have taken their place", other.Ring.Members())
	}
	self.State = Joining
	if m := newView(nil, self, []Member{self}).Owner(0); m != nil {
		t.Errorf("owner in a cluster where nobody is active: %+v", m)
	}
}

func TestViewTakesOverTheRing(t *testing.T) {
	r := newRoster(process("a", 1, 1, Active, 0), []string{"seed:1"})
	r.up(process("b", 2, 2, Active, 0))
	first := r.view(nil)
	n := process("b", 2, 2, Active, 0)
	n.policy = 7
	r.up(n)
	r.up(process("c", 3, 3, Joining, 0))
	second := r.view(first)
	if second.Ring != first.Ring {
		t.Error("the ring was built anew although the active members are the same")
	}
	if second.Version != first.Version+1 || second.Member("b").PolicyHash != 7 {
		t.Errorf("second view: %+v", second)
	}
	if m := second.Member("b"); m.Host != "10.0.0.2" || m.GossipAddr != "10.0.0.2:7946" || m.PeerAddr != "10.0.0.2:7947" ||
		m.HTTPAddr != "10.0.0.2:8080" || m.GRPCAddr != "" {
		t.Errorf("addresses: %+v", m)
	}
}
