package grpc

import (
	"context"
	"io"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/scripted"
)

// bytesStream is a CheckStream whose requests are bytes.
type bytesStream struct {
	weirv1.Limiter_CheckStreamServer
	ctx      context.Context
	requests [][]byte
	answers  int // responses to requests, without more to come
}

func (r *bytesStream) Context() context.Context { return r.ctx }

func (r *bytesStream) RecvMsg(m any) error {
	if len(r.requests) == 0 {
		return io.EOF
	}
	data := r.requests[0]
	r.requests = r.requests[1:]
	return decoded(data, m)
}

func decoded(data []byte, m any) error {
	return wire.Codec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(data)}, m)
}

func (r *bytesStream) Send(out *weirv1.CheckStreamResponse) error {
	if !out.More && out.Ready == nil && out.Topology == nil {
		r.answers++
	}
	return nil
}

// sound is a service that looks at what it is asked.
type sound struct {
	scripted.Service
	t *testing.T
}

func (s *sound) Begin(_ context.Context, b *limiter.Batch) (open []int, err *limit.Error) {
	expect.True(s.t, len(b.Checks) != 0 && len(b.Checks) <= limit.MaxBatch, "a batch of %d", len(b.Checks))
	for i := range b.Checks {
		c := &b.Checks[i]
		expect.True(s.t, (c.Policy == "") != (c.Limit == nil), "a check of neither or both: %+v", c)
	}
	b.Results = make([]limit.Result, len(b.Checks))
	return nil, nil
}

// FuzzCheckStream: whatever comes on a stream, in up to two requests, the stream ends without a panic, with OK or a
// status that blames the caller, and what reaches the service is within bounds; each request before the one to blame
// has its answer.
func FuzzCheckStream(f *testing.F) {
	define := &weirv1.CheckStreamRequest{
		Define: []*weirv1.StreamTarget{{Policy: "p"}, {Number: 1, Limit: &weirv1.Limit{Algorithm: weirv1.Algorithm(
			algo.SlidingLog), Limit: 1, WindowNs: 1e9}, Namespace: "n"}},
		Keys: []byte("ab"), KeyLengths: []uint32{1, 1}, Targets: []uint32{0, 1}, Costs: []int64{1},
		Partial: []bool{true}, RequestIds: []string{"", "r"},
	}
	for _, m := range []*weirv1.CheckStreamRequest{
		{}, define, streamed(1, "a", "b"), {KeyLengths: []uint32{1 << 31}},
		{Targets: []uint32{1023}, KeyLengths: []uint32{0}},
		{Ready: true, Topology: true}, {Borrow: &weirv1.BorrowRequest{}},
	} {
		data := must.Value(m.MarshalVT())(f)
		f.Add(data, data)
	}
	f.Add([]byte{0x0a}, []byte{0xff})
	f.Fuzz(func(t *testing.T, first, second []byte) {
		s := NewServer(ServerConfig{Service: &sound{t: t},
			Topology: func(context.Context) (*weirv1.TopologyResponse, <-chan struct{}, *limit.Error) {
				return &weirv1.TopologyResponse{}, nil, nil
			}})
		stream := &bytesStream{ctx: t.Context(), requests: [][]byte{first, second}}
		err := s.CheckStream(stream)
		s.Close()
		switch status.Code(err) {
		case codes.OK:
			expect.Equal(t, stream.answers, answersTo(t, first)+answersTo(t, second), "answers")
		case codes.InvalidArgument, codes.ResourceExhausted:
		default:
			t.Errorf("%v", err)
		}
	})
}

// answersTo is how many responses answer a request that a stream has taken: none where it asks to be told of the node.
func answersTo(t *testing.T, request []byte) int {
	in := new(weirv1.CheckStreamRequest)
	must.NoError(t, in.UnmarshalVT(request))
	if in.Borrow == nil && len(in.KeyLengths) == 0 && (in.Ready || in.Topology) {
		return 0
	}
	return 1
}

// methods is a registrar that keeps what a service's methods are called by.
type methods struct {
	list    []grpc.MethodDesc
	handler any
}

func (m *methods) RegisterService(desc *grpc.ServiceDesc, handler any) {
	m.list, m.handler = append(m.list, desc.Methods...), handler
}

// FuzzCalls: whatever bytes a method is sent, it answers with a message or a status that blames the caller, and what is
// not answered with a message has charged nothing.
func FuzzCalls(f *testing.F) {
	cost, target := int64(3), &weirv1.Target{Policy: "p", Key: "k"}
	reserve := &weirv1.ReserveRequest{Target: target, Cost: &cost, TtlNs: 1e9}
	for i, m := range []proto.Message{
		&weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: target, Cost: &cost}, {Target: target}}, Atomic: true},
		reserve,
		&weirv1.ReserveAllRequest{Reserves: []*weirv1.ReserveRequest{reserve,
			{Target: target, Usage: map[string]int64{"a": 1}}}},
		&weirv1.CommitEachRequest{Commits: []*weirv1.CommitRequest{{Target: target, ReservationId: "1-2",
			Cost: &cost}}},
		&weirv1.RefundRequest{Target: target, Cost: &cost, RequestId: "r"},
		&weirv1.AcquireRequest{Target: &weirv1.Target{Policy: "c", Key: "k"}},
	} {
		f.Add(uint8(i), must.Value(proto.Marshal(m))(f))
	}
	f.Fuzz(func(t *testing.T, number uint8, data []byte) {
		l := localLimiter(t)
		m := new(methods)
		NewServer(ServerConfig{
			Service: l, Status: func(context.Context) *weirv1.StatusResponse { return new(weirv1.StatusResponse) },
			TopKeys: func(context.Context, *weirv1.TopKeysRequest) (*weirv1.TopKeysResponse, error) {
				return new(weirv1.TopKeysResponse), nil
			},
		}).Register(m)
		method := m.list[int(number)%len(m.list)]
		out, err := method.Handler(m.handler, t.Context(), func(in any) error { return decoded(data, in) }, nil)
		if err == nil {
			must.Value(wire.Codec().Marshal(out))(t)
			return
		}
		switch status.Code(err) {
		case codes.InvalidArgument, codes.NotFound, codes.ResourceExhausted:
		default:
			t.Errorf("%s: %v", method.MethodName, err)
		}
		left := must.Value(l.Check(t.Context(), []limit.Check{{Target: limit.Target{Policy: "p", Key: "k"}}}))(t)
		expect.Equal(t, left[0].Remaining, int64(10), "what is left after %s: %v", method.MethodName, err)
	})
}
