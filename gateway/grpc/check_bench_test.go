package grpc

import (
	"context"
	"fmt"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/test/must"
)

// registered keeps the service that is registered with it.
type registered struct{ desc *grpc.ServiceDesc }

func (r *registered) RegisterService(desc *grpc.ServiceDesc, _ any) { r.desc = desc }

// BenchmarkCheck is a Check from the bytes of its request to those of its answer, without gRPC.
func BenchmarkCheck(b *testing.B) {
	set, err := policy.Parse("test.yaml", []byte("policies: [{name: p, algorithm: token_bucket, limit: 1000000, window: 1s}]"))
	must.NoError(b, err)
	l := limiter.New(limiter.Config{Policies: set})
	defer l.Close()
	s := NewServer(ServerConfig{Service: l, Requests: admission.NewGate(32 << 20)})
	defer s.Close()
	var r registered
	s.Register(&r)
	i := 0
	for r.desc.Methods[i].MethodName != "Check" {
		i++
	}
	handle, codec := r.desc.Methods[i].Handler, wire.ServerCodec(nil, 1<<16)
	intercept := func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		return next(ctx, req)
	}
	for _, n := range []int{1, 100, 1000} {
		b.Run(fmt.Sprintf("batch=%d", n), func(b *testing.B) {
			in := new(weirv1.CheckRequest)
			for i := range n {
				in.Checks = append(in.Checks, &weirv1.Check{Target: &weirv1.Target{Policy: "p", Key: fmt.Sprintf("user:%012d", i)}})
			}
			data, err := proto.Marshal(in)
			must.NoError(b, err)
			read := func(m any) error { return codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(data)}, m) }
			b.ReportAllocs()
			for b.Loop() {
				out, err := handle(s, b.Context(), read, intercept)
				must.NoError(b, err)
				answer := must.Value(codec.Marshal(out))(b)
				answer.Free()
			}
		})
	}
}
