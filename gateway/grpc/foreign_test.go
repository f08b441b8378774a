package grpc

import (
	"context"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/testkit"
)

// TestForeignRequestsShareMemory is an attack: messages of another service with tens of thousands of empty elements, many at a time. As
// many are decoded as there is room for; small ones do not wait, and all of it is given back.
func TestForeignRequestsShareMemory(t *testing.T) {
	noLeaks(t)
	var running atomic.Int64
	begun, goOn := make(chan struct{}, 100), make(chan struct{})
	desc := grpc.ServiceDesc{
		ServiceName: "foreign.Service", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Ask", Handler: func(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			in := new(structpb.ListValue)
			if err := decode(in); err != nil {
				return nil, err
			}
			if len(in.Values) > 1 {
				running.Add(1)
				begun <- struct{}{}
				<-goOn
			}
			return in, nil
		}}},
	}
	large := &structpb.ListValue{Values: make([]*structpb.Value, 20_000)}
	for i := range large.Values {
		large.Values[i] = new(structpb.Value)
	}
	const size = 2 * 20_000
	need := max(size*perByte+admission.Parts(size), size*perByte+limit.MaxBatch*perCheck)
	gate := admission.NewGate(2 * need)
	conn := testkit.Dial(t, serve(t, func(r grpc.ServiceRegistrar) { Admitted(r, gate).RegisterService(&desc, nil) }))
	ask := func(in *structpb.ListValue) error {
		return conn.Invoke(t.Context(), "/foreign.Service/Ask", in, new(structpb.ListValue))
	}
	errs := make(chan error, 10)
	for range 10 {
		go func() { errs <- ask(large) }()
	}
	<-begun
	<-begun
	for range 50 {
		expect.NoError(t, ask(&structpb.ListValue{Values: large.Values[:1]}))
	}
	expect.Equal(t, running.Load(), 2, "large requests are carried out, there is room for 2")
	close(goOn)
	for range 10 {
		expect.NoError(t, <-errs)
	}
	taken, err := gate.Enter(t.Context(), 2*need)
	expect.True(t, err == nil && taken != 0, "not all has been given back")
}
