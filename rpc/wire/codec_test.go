package wire

import (
	"bytes"
	"strings"
	"testing"

	"google.golang.org/grpc/encoding"
	standard "google.golang.org/grpc/encoding/proto"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"

	"github.com/weirlimit/weir/test/must"

	"github.com/weirlimit/weir/test/expect"
)

// messages are of every kind that the codec treats in a way of its own: generated marshalling, that with a pool, neither.
func messages() []proto.Message {
	long := string(bytes.Repeat([]byte("k"), 4000)) // above the size from which buffers are pooled
	check := &weirv1.CheckRequest{Checks: []*weirv1.Check{
		{Target: &weirv1.Target{Policy: "p", Key: "k"}, Cost: proto.Int64(0)},
		{Target: &weirv1.Target{Limit: &weirv1.Limit{Algorithm: 4, Limit: -1, TimeZone: "UTC"}, Key: long}, RequestId: "r", Partial: true},
	}}
	return []proto.Message{
		&weirv1.CheckRequest{}, check,
		&weirv1.Decision{Policy: "p", RetryAfterNs: proto.Int64(0), Limits: []*weirv1.LimitStatus{{Limit: -1}, {RetryAfterNs: proto.Int64(-1)}}},
		&peerv1.ForwardRequest{Body: &peerv1.ForwardRequest_Batch{Batch: &peerv1.Batch{Sequence: 1, Checks: &weirv1.CheckStreamRequest{Keys: []byte(long)}}}},
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
			sent, err := c.from.Marshal(m)
			must.NoError(t, err)
			got := proto.Clone(m)
			if r, ok := got.(*weirv1.CheckRequest); ok {
				r.Checks = append(r.Checks, &weirv1.Check{Target: &weirv1.Target{Policy: "old"}, RequestId: "old"})
			}
			err = c.to.Unmarshal(sent, got)
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
		data, err := c.Marshal(in)
		must.NoError(t, err)
		n, room := data.Len(), cap(data[0].ReadOnlyData())
		expect.True(t, len(data) == 1 && room <= 2*n, "%d bytes take %d", n, room)
		var out weirv1.CheckStreamRequest
		err = c.Unmarshal(data, &out)
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
		data, err := c.Marshal(test.in)
		must.NoError(t, err)
		out := test.in.ProtoReflect().New().Interface()
		err = c.Unmarshal(data, out)
		expect.True(t, (err == nil) == test.ok && (!test.ok || proto.Equal(out, test.in)), "%s: %v", test.name, err)
	}
	// One field is given again and again, in the form that is not packed, or cut off.
	for data, ok := range map[string]bool{
		strings.Repeat("\x12\x00", most): true, strings.Repeat("\x12\x00", most+1): false, strings.Repeat("\x0a\x00\x12\x00", most): false,
		strings.Repeat("\x7a\x00", 10*most): true, // no field
	} {
		err := c.Unmarshal(mem.BufferSlice{mem.SliceBuffer(data)}, &peerv1.ForwardRequest{})
		expect.True(t, (err == nil) == ok, "%d bytes: %v", len(data), err)
	}
}
