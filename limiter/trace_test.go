package limiter

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// spans notes what a Tracer is told, with a span's name and number as its Context.
type spans struct {
	begun []string
	ended map[string][]Traced
}

type noted struct {
	to   *spans
	name string
}

func (s *spans) begin(name string) Span {
	name += string(rune('0' + len(s.begun)))
	s.begun = append(s.begun, name)
	return noted{s, name}
}
func (s *spans) Start(ctx context.Context, name string) (context.Context, Span) {
	if s.ended["no"] != nil {
		return ctx, nil
	}
	return ctx, s.begin(name)
}
func (s *spans) Continue(parent, name string) Span {
	if parent == "malformed" {
		return nil
	}
	return s.begin(parent + ">" + name)
}
func (s *spans) Below(parent, name string) Span { return s.begin(parent + "+" + name) }
func (n noted) Context() string                 { return n.name }
func (n noted) Peer(string)                     {}
func (n noted) End(about []Traced)              { n.to.ended[n.name] = about }
func (s *spans) all(t *testing.T) {
	t.Helper()
	for _, name := range s.begun {
		_, ok := s.ended[name]
		expect.True(t, ok, "span %s does not end", name)
	}
}

// TestTraced: spans say what came of operations, are bounded in number, and all end.
func TestTraced(t *testing.T) {
	set, err := policy.Parse("p.yaml", []byte(`policies: [{name: p, algorithm: token_bucket, limit: 1, window: 1h}]`))
	must.NoError(t, err)
	s := &spans{ended: make(map[string][]Traced)}
	l := started(t, Config{Policies: set, Tracer: s})
	check := func(policy string) limit.Check {
		return limit.Check{Target: onPolicy(policy, "alice"), Cost: 1}
	}

	must.Value(l.Check(t.Context(), []limit.Check{check("p"), check("p"), check("none")}))(t)
	got := s.ended["decide0"]
	expect.True(t, len(got) == 3 && got[0].Result == "allowed" && got[1].Result == "refused" &&
		got[2].Result == "error" && got[0].Policy == "p" && got[0].Operation == "check" && got[0].Term != "" &&
		got[0].Partition != 0, "%+v", got)
	must.Value(l.Check(t.Context(), slices.Repeat([]limit.Check{check("p")}, limit.MaxBatch)))(t)
	n := len(s.ended["decide1"])
	expect.True(t, n == maxTraced, "a span is told of %d checks, want %d", n, maxTraced)

	_, err = l.Check(t.Context(), []limit.Check{check("p"), check("")})
	expect.True(t, err != nil && len(s.begun) == 2, "a batch that is refused as a whole: %v, spans %v", err, s.begun)

	bad := &Op{Kind: OpCheck, Check: new(check("p")), Trace: "malformed"}
	invalid := &Op{Kind: OpCheck, Check: new(check("not \xff a name")), Trace: "far"}
	ops := []*Op{bad, invalid, {Kind: OpReset, Check: new(check("p")), Trace: "near"},
		{Kind: OpReset, Check: new(check("p")), Trace: "near"},
		{Kind: OpCheck, Check: new(check("p"))}}
	for i := range 100 {
		ops = append(ops, &Op{Kind: OpCheck, Check: new(check("p")), Trace: fmt.Sprint(i)})
	}
	before := len(s.begun)
	must.True(t, l.Receive(ops) == nil, "something waits")
	expect.Equal(t, len(s.begun)-before, maxSpans, "spans for a message")
	expect.True(t, bad.Trace == "" && ops[4].Trace == "" && ops[104].Trace == "",
		"what is not traced here goes on being traced")
	got = s.ended["far>decide2"]
	expect.True(t, len(got) == 1 && got[0].Result == "error" && got[0].Policy == "", "%+v", got)
	got = s.ended["near>decide3"]
	expect.True(t, len(got) == 2 && got[0].Result == "ok" && got[0].Operation == "reset", "of the same caller: %+v",
		got)
	s.all(t)
}

// TestTracedBatch: the checks of a batch belong to their callers' traces, also where another node decides.
func TestTracedBatch(t *testing.T) {
	s := &spans{ended: map[string][]Traced{"no": {}}} // the call as such is not traced
	inBubble(t, 2, Config{Policies: policies(t, plain), Tracer: s}, func(t *testing.T, c *testCluster) {
		var b Batch
		for i := range 4 {
			b.Checks = append(b.Checks, named("p", c.owned("p", i%2, i), 1))
		}
		b.Checks[2].Key = ""
		b.Traces = []string{"A", "B", "C", ""}
		// The first to be asked is not the one who decides: what is asked again hangs below the same span.
		sent := 0
		var arrived []string
		c.tamper(func(_ context.Context, _ *testNode, _ ownership.Node, ops []*Op, deliver func()) {
			if sent++; sent == 1 {
				for _, op := range ops {
					op.Outcome.NotHolder = &ownership.Route{}
				}
				return
			}
			for _, op := range ops {
				arrived = append(arrived, op.Trace)
			}
			deliver()
		})
		open, err := c.nodes[0].Begin(t.Context(), &b)
		must.True(t, err == nil && slices.Equal(open, []int{1, 3}), "%v %v", open, err)
		c.nodes[0].Finish(t.Context(), &b, open)
		want := []string{"A+decide0", "B+decide1", "C+decide2", "B+decide1+forward3", "B+decide1+forward4"}
		expect.True(t, slices.Equal(s.begun, want) && slices.Equal(arrived, []string{"B+decide1+forward4", ""}),
			"spans %q; arrived %q", s.begun, arrived)
		for name, result := range map[string]string{want[0]: "allowed", want[1]: "allowed", want[2]: "error"} {
			if got := s.ended[name]; len(got) != 1 || got[0].Result != result || got[0].Operation != "check" {
				t.Errorf("%s: %+v", name, got)
			}
		}
		s.all(t)
		if b.Reset(); b.Traces != nil || b.spans != nil {
			t.Error("a batch that is used again has traces")
		}
	})
}
