package grpcapi

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/internal/memory"
	"github.com/weirlimit/weir/rpc/wire"
)

const (
	// perForeignByte is what a byte of another service's message may take when it is decoded: an empty element has two.
	perForeignByte = 64
	// maxForeign is the most that elements take: the codec decodes no more than 65,536 of them.
	maxForeign = 10 << 20
)

// Admitted returns a registrar for unary services of other front ends than Weir's own: their requests wait for room in the gate before
// they are decoded, and keep it until they are answered, as those of Weir's service do.
func Admitted(r grpc.ServiceRegistrar, gate *memory.Gate) grpc.ServiceRegistrar {
	return admitted{r, gate}
}

type admitted struct {
	to   grpc.ServiceRegistrar
	gate *memory.Gate
}

// RegisterService implements grpc.ServiceRegistrar.
func (r admitted) RegisterService(desc *grpc.ServiceDesc, impl any) {
	bounded := *desc
	bounded.Methods = nil
	for _, m := range desc.Methods {
		handler := m.Handler
		m.Handler = func(srv any, ctx context.Context, dec func(any) error, i grpc.UnaryServerInterceptor) (any, error) {
			a := admission{gate: r.gate}
			defer a.leave()
			return handler(srv, ctx, func(v any) error {
				m := &wire.Lenient{Message: v.(proto.Message), Admit: func(size int) error { return a.take(ctx, foreign(size)) }}
				if err := dec(m); err != nil {
					return err
				}
				return undecoded(m)
			}, i)
		}
		bounded.Methods = append(bounded.Methods, m)
	}
	r.to.RegisterService(&bounded, impl)
}

// foreign is what a message of that size takes.
func foreign(size int) int64 {
	return int64(size)*perByte + min(int64(size)*perForeignByte, maxForeign)
}
