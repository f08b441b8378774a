package admission

import (
	"context"
	"net"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/weirlimit/weir/test/must"

	"github.com/weirlimit/weir/test/expect"
)

// processorTime is what the process has had of the processors so far, of both sides of the calls.
func processorTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	must.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkUnary is a unary call over loopback, of a server without the bounds of this package and of one with them.
func BenchmarkUnary(b *testing.B) {
	desc := grpc.ServiceDesc{
		ServiceName: "bench.Service", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Unary", Handler: func(_ any, ctx context.Context, decode func(any) error, intercept grpc.UnaryServerInterceptor) (any, error) {
			in := new(emptypb.Empty)
			if err := decode(in); err != nil {
				return nil, err
			}
			return in, nil
		}}},
	}
	for _, bounded := range []bool{false, true} {
		name := map[bool]string{false: "without", true: "with"}[bounded]
		b.Run(name, func(b *testing.B) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			must.NoError(b, err)
			server := grpc.NewServer()
			services := grpc.ServiceRegistrar(server)
			if bounded {
				calls := NewCalls(CallsConfig{
					Authorize:    func(ctx context.Context, _ string) (context.Context, error) { return ctx, nil },
					MaxAnonymous: 128, FirstMessage: 10 * time.Second, MaxCalls: 1000,
					Caller: func(context.Context) (string, bool) { return "caller", true },
				})
				server = grpc.NewServer(calls.Options()...)
				services = calls.Registrar(server)
				l = NewListener(l, ListenerConfig{MaxConnections: 1000, MaxAnonymous: 128})
			}
			services.RegisterService(&desc, nil)
			served := make(chan error, 1)
			go func() { served <- server.Serve(l) }()
			conn := must.Value(grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials())))(b)
			before := processorTime(b)
			for b.Loop() {
				err := conn.Invoke(b.Context(), "/bench.Service/Unary", new(emptypb.Empty), new(emptypb.Empty))
				must.NoError(b, err)
			}
			b.ReportMetric(float64(processorTime(b)-before)/float64(b.N), "cpu-ns/op")
			_ = conn.Close()
			server.Stop()
			err = <-served
			expect.NoError(b, err)
		})
	}
}
