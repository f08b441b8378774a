package wire

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/encoding"
	standard "google.golang.org/grpc/encoding/proto"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// messages are of every kind that the codec treats in a way of its own: generated marshalling, that with a pool,
// neither.
func messages() []proto.Message {
	long := string(bytes.Repeat([]byte("k"), 4000)) // above the size from which buffers are pooled
	check := &weirv1.CheckRequest{Checks: []*weirv1.Check{
		{Target: &weirv1.Target{Policy: "p", Key: "k"}, Cost: proto.Int64(0)},
		{Target: &weirv1.Target{Limit: &weirv1.Limit{Algorithm: 4, Limit: -1, TimeZone: "UTC"}, Key: long},
			RequestId: "r", Partial: true},
	}}
	return []proto.Message{
		&weirv1.CheckRequest{}, check,
		&weirv1.Decision{Policy: "p", RetryAfterNs: proto.Int64(0),
			Limits: []*weirv1.LimitStatus{{Limit: -1}, {RetryAfterNs: proto.Int64(-1)}}},
		&peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Batch{Batch: &peerv1.Batch{Sequence: 1,
			Checks: &weirv1.CheckStreamRequest{Keys: []byte(long)}}}},
		&peerv1.Item{Hops: 3, Target: check.Checks[1].Target, RequestId: "r"},
		&peerv1.ConverseRequest{Messages: [][]byte{[]byte(long), {}}},
		&healthv1.HealthCheckRequest{Service: "s"},
	}
}

// The bytes are those of gRPC's own codec, in both directions, and nothing of an earlier message is left in one that is
// used again.
func TestCodec(t *testing.T) {
	ours, theirs := Codec(), encoding.GetCodecV2(standard.Name)
	for _, m := range messages() {
		for _, c := range []struct{ from, to encoding.CodecV2 }{{ours, theirs}, {theirs, ours}, {ours, ours}} {
			sent := must.Value(c.from.Marshal(m))(t)
			got := proto.Clone(m)
			if r, ok := got.(*weirv1.CheckRequest); ok {
				r.Checks = append(r.Checks, &weirv1.Check{Target: &weirv1.Target{Policy: "old"}, RequestId: "old"})
			}
			err := c.to.Unmarshal(sent, got)
			expect.True(t, err == nil && proto.Equal(got, m), "%T: %v\ngot  %v\nwant %v", m, err, got, m)
			sent.Free()
		}
	}
	_, err := ours.Marshal("no message")
	expect.True(t, err != nil, "a string is no message")
}

func TestMalformed(t *testing.T) {
	bad := mem.BufferSlice{mem.SliceBuffer("\x0a\x7f\x01")}
	err := Codec().Unmarshal(bad, &weirv1.CheckRequest{})
	expect.True(t, err != nil, "a message that is cut short is no message")
	for _, m := range []proto.Message{&weirv1.CheckRequest{}, &healthv1.HealthCheckRequest{}} {
		l := &Lenient{Message: m}
		err := Codec().Unmarshal(bad, l)
		expect.True(t, err == nil && l.Err != nil, "%T: %v, and kept %v", m, err, l.Err)
	}
}

// TestBuffersFit: a message takes a buffer of its own size, or twice that at most.
func TestBuffersFit(t *testing.T) {
	c := Codec()
	for size := 2 << 10; size <= 8<<20; size = size*3 + 1 {
		in := &weirv1.CheckStreamRequest{Keys: make([]byte, size)}
		data := must.Value(c.Marshal(in))(t)
		n, room := data.Len(), cap(data[0].ReadOnlyData())
		expect.True(t, len(data) == 1 && room <= 2*n, "%d bytes take %d", n, room)
		var out weirv1.CheckStreamRequest
		err := c.Unmarshal(data, &out)
		expect.True(t, err == nil && len(out.Keys) == size, "%d bytes are %d when read: %v", size, len(out.Keys), err)
		data.Free()
	}
}

// TestServerCodec: what would be decoded into more than so many elements, at whatever depth, is an error before it is.
func TestServerCodec(t *testing.T) {
	const most = 100
	c := ServerCodec(nil, most)
	targets := func(n int) *peerv1.ForwardRequest {
		b := &peerv1.Batch{Checks: new(weirv1.CheckStreamRequest)}
		for range n {
			b.Checks.Define = append(b.Checks.Define, &weirv1.StreamTarget{})
		}
		return &peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Batch{Batch: b}}
	}
	lengths := func(n int) *peerv1.ForwardRequest {
		b := &peerv1.Batch{Checks: &weirv1.CheckStreamRequest{KeyLengths: make([]uint32, n)}, Flags: make([]uint32, n)}
		return &peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Batch{Batch: b}}
	}
	for _, test := range []struct {
		name string
		in   proto.Message
		ok   bool
	}{
		{"targets", targets(most - 2), true},
		{"more targets", targets(most - 1), false},
		{"messages", &peerv1.ConverseRequest{Messages: make([][]byte, most)}, true},
		{"more messages", &peerv1.ConverseRequest{Messages: make([][]byte, most+1)}, false},
		{"numbers", lengths(most/2 - 1), true},
		{"more numbers", lengths(most / 2), false},
		{"bytes", &peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Batch{Batch: &peerv1.Batch{Checks: &weirv1.CheckStreamRequest{Keys: make([]byte, 10*most)}}}}, true},
	} {
		data := must.Value(c.Marshal(test.in))(t)
		out := test.in.ProtoReflect().New().Interface()
		err := c.Unmarshal(data, out)
		expect.True(t, (err == nil) == test.ok && (!test.ok || proto.Equal(out, test.in)), "%s: %v", test.name, err)
	}
	// One field is given again and again, in the form that is not packed, or cut off.
	for data, ok := range map[string]bool{
		strings.Repeat("\x12\x00", most): true, strings.Repeat("\x12\x00", most+1): false,
		strings.Repeat("\x0a\x00\x12\x00", most): false,
		strings.Repeat("\x7a\x00", 10*most):      true, // no field
	} {
		err := c.Unmarshal(mem.BufferSlice{mem.SliceBuffer(data)}, &peerv1.ForwardRequest{})
		expect.True(t, (err == nil) == ok, "%d bytes: %v", len(data), err)
	}
}

// TestLists: a list is as short as will do, and has every value.
func TestLists(t *testing.T) {
	for _, c := range []struct{ values, list []int }{
		{nil, nil}, {[]int{1}, nil}, {[]int{1, 1, 1}, nil}, {[]int{2}, []int{2}}, {[]int{2, 2}, []int{2}},
		{[]int{0, 0}, []int{0}},
		{[]int{1, 2}, []int{1, 2}}, {[]int{2, 2, 1}, []int{2, 2, 1}}, {[]int{1, 1, 2, 1}, []int{1, 1, 2, 1}},
		{[]int{2, 1, 1}, []int{2, 1, 1}},
	} {
		list := []int{7, 7, 7}[:0] // of a message before
		for i, v := range c.values {
			Add(&list, i, len(c.values), v, 1)
		}
		expect.True(t, slices.Equal(list, c.list) && Fits(list, len(c.values)), "%v: %v, want %v", c.values, list,
			c.list)
		for i, v := range c.values {
			expect.Equal(t, At(list, i, 1), v, "%v: element %d of %v", c.values, i, list)
		}
	}
	expect.True(t, !Fits([]int{1, 2}, 3), "two elements do not fit three checks")
}

// TestChecksAndDecisions: what is added is read.
func TestChecksAndDecisions(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	some := func() int64 { return []int64{0, 1, -1, rng.Int64()}[rng.IntN(4)] }
	targets := Targets{{Policy: "p"}, {Policy: "q"}}
	for n := range 40 {
		in, out := new(weirv1.CheckStreamRequest), new(weirv1.CheckStreamResponse)
		checks, decisions := make([]limit.Check, n), make([]limit.Decision, n)
		one := rng.IntN(2) == 0 // all are alike
		for i := range checks {
			number := rng.IntN(2)
			checks[i] = limit.Check{Target: targets[number], Cost: some(), Partial: rng.IntN(2) == 0,
				RequestID: []string{"", "r"}[rng.IntN(2)]}
			d := &decisions[i]
			for _, f := range numbers(d, new(int64), out) {
				*f.field = some()
			}
			for _, f := range truths(d) {
				*f = rng.IntN(2) == 0
			}
			d.RetryAfter = []time.Duration{0, 5, algo.Never}[rng.IntN(3)]
			if one && i > 0 {
				checks[i], decisions[i], number = checks[0], decisions[0],
					slices.Index([]string{"p", "q"}, checks[0].Policy)
			}
			checks[i].Key = "k" + string(rune('a'+i))
			AddCheck(in, i, n, uint32(number), &checks[i])
			AddDecision(out, i, n, uint32(i), d)
		}
		expect.True(t, (!one || n <= 0 || len(in.Costs)+len(in.Targets)+len(in.Partial)+len(in.RequestIds) <= 4) &&
			(!one || len(out.Limit) <= 1), "lists are too long: %v, %v", in, out)
		got := make([]limit.Check, n)
		err := ReadChecks(in, targets.At, func(i int) *limit.Check { return &got[i] })
		must.True(t, err == nil && DecisionsFit(out, n), "%v %v", err, out)
		back := make([]limit.Decision, n)
		for i := range back {
			ReadDecision(out, i, &back[i])
		}
		must.NoDiff(t, cmp.Diff(checks, got)+cmp.Diff(decisions, back))
	}
}

func TestLimitNonsense(t *testing.T) {
	for _, test := range []struct {
		limit *weirv1.Limit
		field string
	}{
		{&weirv1.Limit{}, "limit.algorithm"},
		{&weirv1.Limit{Algorithm: -1}, "limit.algorithm"},
		{&weirv1.Limit{Algorithm: 8}, "limit.algorithm"},
		{&weirv1.Limit{Algorithm: 256 + 4}, "limit.algorithm"},
		{&weirv1.Limit{Algorithm: 4, Period: -1}, "limit.period"},
		{&weirv1.Limit{Algorithm: 4, Period: 8}, "limit.period"},
		{&weirv1.Limit{Algorithm: 4, Period: 256 + 1}, "limit.period"},
		{&weirv1.Limit{Algorithm: 1, Period: 3, TimeZone: "Mars/Olympus"}, "limit.time_zone"},
		{&weirv1.Limit{Algorithm: 1, Period: 3, TimeZone: "Local"}, "limit.time_zone"},
		{&weirv1.Limit{Algorithm: 1, Period: 3, TimeZone: "../../etc/passwd"}, "limit.time_zone"},
	} {
		_, err := Target(&weirv1.Target{Limit: test.limit, Key: "k"})
		expect.True(t, err != nil && err.Field == test.field && err.Kind == limit.Invalid && err.Message != "",
			"%+v: %v", test.limit, err)
	}
	got, err := Target(nil)
	expect.True(t, err == nil && got == (limit.Target{}), "no target at all: %+v, %v", got, err)
}

// TestField: every name is that of a field in the messages, and comes back.
func TestField(t *testing.T) {
	field := func(name string) string { return Named(limit.NewError(limit.Invalid, name, "m")).Field }
	for name, want := range map[string]string{
		"key": "target.key", "policy": "target.policy", "namespace": "target.namespace", "limit": "target.limit",
		"limit.limit": "target.limit.limit", "limit.window": "target.limit.window_ns",
		"limit.time_zone": "target.limit.time_zone",
		"limit.capacity":  "target.limit.capacity", "limit.slots": "target.limit.slots",
		"limit.algorithm":    "target.limit.algorithm",
		"limit.count_denied": "target.limit.count_denied", "cost": "cost", "partial": "partial",
		"request_id": "request_id",
	} {
		got := field(name)
		expect.True(t, got == want && FieldOf(got) == name, "%s: %s, and back %s", name, got, FieldOf(got))
		for _, list := range []string{"checks", "reserves"} {
			got := Named(limit.NewError(limit.Invalid, name, "m").InList(list, 3))
			of, i, _ := got.Element()
			expect.True(t, got.Field == list+"[3]."+want && FieldOf(got.Field) == list+"[3]."+name && of == list &&
				i == 3, "%s[3].%s: %s, and back %s", list, name, got.Field, FieldOf(got.Field))
		}
		expect.Equal(t, exists((&weirv1.Check{}).ProtoReflect().Descriptor(), want), "", "a Check has no")
	}
	for name, want := range map[string]string{"ttl": "ttl_ns", "": "", "checks": "checks", "checks[3].": "checks[3].",
		"lease_id": "lease_id"} {
		got := field(name)
		expect.True(t, got == want && FieldOf(got) == name, "%q: %q, and back %q", name, got, FieldOf(got))
	}
	got := field("limit.align")
	expect.True(t, got == "target.limit.period", "%v", got)
	field = func(name string) string { return StreamNamed(limit.NewError(limit.Invalid, name, "m")).Field }
	for name, want := range map[string]string{"checks": "key_lengths", "key": "keys", "cost": "costs",
		"request_id": "request_ids", "partial": "partial"} {
		got := field(name)
		expect.True(t, got == want && FieldOf(got) == name, "%s: %s, and back %s", name, got, FieldOf(got))
		err := exists((&weirv1.CheckStreamRequest{}).ProtoReflect().Descriptor(), want)
		expect.True(t, err == "", "a CheckStreamRequest has no %s", err)
	}
	got = field("limit.window")
	expect.True(t, got == "limit.window_ns" && FieldOf(got) == "limit.window", "%v", got)
}

// exists says which part of a field's name a message lacks.
func exists(m protoreflect.MessageDescriptor, name string) string {
	for part := range strings.SplitSeq(name, ".") {
		f := m.Fields().ByName(protoreflect.Name(part))
		if f == nil {
			return part
		}
		m = f.Message()
	}
	return ""
}

// TestNumbers: both sides of a stream understand each other, what is the same target has one number, and there are so
// many.
func TestNumbers(t *testing.T) {
	inline := func(units int64) *algo.Limit {
		return &algo.Limit{Algorithm: algo.SlidingLog, Limit: units, Window: time.Minute}
	}
	list := []limit.Target{
		{Policy: "p", Key: "a"}, {Policy: "p", Key: "b"}, {Policy: "q", Key: "a"}, {Limit: inline(1), Key: "a"},
		{Limit: inline(1), Key: "b"},
		{Limit: inline(2), Key: "a"}, {Limit: inline(2), Namespace: "n", Key: "a"},
	}
	var given Numbers
	var known Targets
	for _, units := range []string{"first", "after a reset"} {
		same := 0
		for i := range list {
			n, fresh := given.Of(&list[i])
			if fresh {
				must.Equal(t, known.Define(n), nil)
			} else {
				same++
			}
			got, ok := known.At(uint64(n.Number))
			got.Key = list[i].Key
			expect.True(t, ok && SameTarget(&got, &list[i]), "%s: %+v became %+v", units, list[i], got)
		}
		expect.True(t, same == 2, "%s: %d have the number of another", units, same)
		given.Reset()
	}
	for i := range MaxTargets {
		n, fresh := given.Of(&limit.Target{Policy: fmt.Sprint("p", i)})
		must.True(t, n != nil && fresh && n.Number == uint32(i), "%d: %+v", i, n)
	}
	n, _ := given.Of(&limit.Target{Policy: "one more"})
	expect.Equal(t, n, nil)
	n, fresh := given.Of(&limit.Target{Policy: "p7", Key: "k"})
	expect.True(t, n != nil && !fresh && n.Number == 7, "%+v", n)
}
